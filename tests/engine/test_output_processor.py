"""From tokens to text: what is shown when, how it ends, and what the last output carries."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.core.request import Request, RequestStatus
from miniserve.engine.output_processor import OutputProcessor
from miniserve.outputs import EngineOutput, FinishReason, Usage
from tests.engine.scripted import EOS, TOKENIZER, make_request, token, tokens


class Generation:
    """One request, fed token by token as the scheduler would report it."""

    def __init__(self, **sampling: Any) -> None:
        self.request: Request = make_request("r", **sampling)
        self.processor = OutputProcessor(TOKENIZER)
        self.processor.add(self.request)

    def push(self, *token_ids: int, end: FinishReason | None = None) -> tuple[EngineOutput, str | None]:
        self.request.token_ids += token_ids
        if end is not None:
            self.request.status, self.request.finish_reason = RequestStatus.FINISHED, end
        return self.processor.process(self.request, token_ids)


def test_text_comes_with_its_token() -> None:
    generation = Generation()
    assert generation.push(token("Hello")) == (EngineOutput("r", (token("Hello"),), "Hello"), None)
    assert generation.push(token(" world")) == (EngineOutput("r", (token(" world"),), " world"), None)


def test_eos_is_counted_and_not_shown() -> None:
    generation = Generation()
    generation.push(token("Hello"))
    output, stop = generation.push(EOS, end=FinishReason.STOP)
    assert (output.text, output.token_ids, output.finish_reason, stop) == ("", (EOS,), FinishReason.STOP, None)
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)


def test_stop_token_is_not_shown() -> None:
    generation = Generation(stop_token_ids=(token("!"),))
    generation.request.stop_reason = token("!")
    output, _ = generation.push(token("a"), token("!"), end=FinishReason.STOP)
    assert (output.text, output.stop_reason) == ("a", token("!"))


def test_ignored_eos_goes_on() -> None:
    generation = Generation(ignore_eos=True)
    assert generation.push(EOS)[0] == EngineOutput("r", (EOS,), "")
    assert generation.push(token("a"))[0].text == "a"


def test_stop_string_across_tokens() -> None:
    """Bug: "DEF", "G", "HI" were sent before the stop string DEFGHIJ was complete."""
    generation = Generation(stop=("DEFGHIJ",))
    shown = [generation.push(*tokens(text))[0].text for text in ("ABC", "DEF", "G", "HI")]
    output, stop = generation.push(token("J"))
    assert shown == ["ABC", "", "", ""]
    assert (output.text, output.finish_reason, output.stop_reason, stop) == (
        "",
        FinishReason.STOP,
        "DEFGHIJ",
        "DEFGHIJ",
    )


def test_held_text_comes_when_it_turns_out_harmless() -> None:
    generation = Generation(stop=("STOP",))
    assert generation.push(token("ST"))[0].text == ""
    assert generation.push(token("A"))[0].text == "STA"


def test_text_before_a_stop_string_in_the_same_token() -> None:
    """Bug: a token that held text and the stop string was dropped as a whole."""
    generation = Generation(stop=("STOP",))
    output, stop = generation.push(token("see STOP here"))
    assert (output.text, stop) == ("see ", "STOP")


def test_the_prompt_does_not_match() -> None:
    """Bug: a prompt that ends with a stop string confused the matcher."""
    generation = Generation(prompt="ST", stop=("STOP",))
    assert generation.push(token("OP"))[0].text == "OP"


def test_stop_string_of_the_last_allowed_token() -> None:
    generation = Generation(stop=("STOP",), max_tokens=2)
    generation.push(token("ST"))
    output, stop = generation.push(token("OP"), end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason, stop) == ("", FinishReason.STOP, "STOP", "STOP")


def test_held_text_is_flushed_at_length() -> None:
    """Bug: with a stop string that began but did not end, the last words of an answer were lost."""
    generation = Generation(stop=("STOP",), max_tokens=1)
    output, stop = generation.push(token("ST"), end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, stop) == ("ST", FinishReason.LENGTH, None)


def test_held_text_is_flushed_at_eos() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("ST"))
    output, stop = generation.push(EOS, end=FinishReason.STOP)
    assert (output.text, output.finish_reason, stop) == ("ST", FinishReason.STOP, None)


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    generation = Generation()
    half = tokens("𠀀")[:3]
    assert [generation.push(token_id)[0].text for token_id in half[:2]] == ["", ""]
    assert generation.push(half[2], end=FinishReason.LENGTH)[0].text == "\ufffd"


def test_half_a_character_that_completes_a_stop_string() -> None:
    generation = Generation(stop=("a\ufffd",))
    assert generation.push(token("a"))[0].text == ""
    output, stop = generation.push(tokens("é")[0], end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, stop) == ("", FinishReason.STOP, "a\ufffd")


def test_abort_drops_what_was_held_back() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("ST"))
    output = generation.processor.abort(generation.request)
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.ABORT)
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0)


def test_timing() -> None:
    generation = Generation()
    assert generation.push(token("a"))[0].timing is None
    output, _ = generation.push(EOS, end=FinishReason.STOP)
    assert output.timing is not None
    assert 0 < output.timing.first_token <= output.timing.total < 60


def test_an_abort_before_the_first_token_has_timing_too() -> None:
    generation = Generation()
    timing = generation.processor.abort(generation.request).timing
    assert timing is not None and timing.first_token == timing.total > 0


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.ABORT])
def test_a_finished_request_is_forgotten(end: FinishReason) -> None:
    """Bug: a state for each request that ever ran, kept for ever."""
    generation = Generation()
    if end is FinishReason.ABORT:
        generation.processor.abort(generation.request)
    else:
        generation.push(EOS, end=end)
    with pytest.raises(KeyError):
        generation.push(token("a"))


def test_a_finished_id_may_be_used_again() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("S"))
    generation.push(EOS, end=FinishReason.STOP)
    again = make_request("r")
    generation.processor.add(again)
    assert generation.processor.process(again, (token("a"),))[0].text == "a"
