"""From tokens to text: what is shown when, how it ends, and what the last output carries."""

from __future__ import annotations

import time
from typing import Any

import pytest

from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import RequestNews
from miniserve.engine.output_processor import OutputProcessor, Processed
from miniserve.outputs import EngineOutput, FinishReason, TokenLogprobs, Usage
from tests.engine.scripted import EOS, TOKENIZER, make_request, scripted_logprobs, token, tokens


class Generation:
    """One request, fed token by token as the scheduler would report it."""

    def __init__(self, **sampling: Any) -> None:
        self.request: Request = make_request("r", **sampling)
        self.processor = OutputProcessor(TOKENIZER)
        self.processor.add({self.request.request_id: self.processor.state(self.request)})

    def push(self, *token_ids: int, end: FinishReason | None = None, stop_reason: int | None = None) -> EngineOutput:
        logprobs = tuple(scripted_logprobs(token_id, 2) for token_id in token_ids)
        processed = self.take(
            RequestNews(self.request, token_ids, logprobs if self.request.sampling.logprobs is not None else ()),
            end=end,
            stop_reason=stop_reason,
        )
        assert processed is not None
        return processed.output

    def take(
        self, news: RequestNews, *, end: FinishReason | None = None, stop_reason: int | None = None
    ) -> Processed | None:
        self.request.token_ids += news.token_ids
        if end is not None:
            self.request.status, self.request.finish_reason = RequestStatus.FINISHED, end
            self.request.stop_reason = stop_reason
        return self.processor.process(news)

    def step(self) -> SchedulerOutput:
        """Some step that this request is in."""
        number = self.request.num_tokens
        return SchedulerOutput(
            (ScheduledRequest("r", self.request.token_ids, 0, number, (), number, self.request.sampling, True),)
        )

    def take_prompt_logprobs(self, start: int, end: int) -> Processed | None:
        return self.take(
            RequestNews(self.request, prompt_start=start, prompt_logprobs=self.prompt_logprobs(start, end))
        )

    def prompt_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        return tuple(scripted_logprobs(token_id, 1) for token_id in self.request.token_ids[start:end])


def test_text_comes_with_its_token() -> None:
    generation = Generation()
    for number, text in enumerate(("Hello", " world"), start=1):
        output = generation.push(token(text))
        assert (output.token_ids, output.text, output.finish_reason) == ((token(text),), text, None)
        assert output.usage == Usage(prompt_tokens=3, completion_tokens=number, cached_tokens=0)


def test_eos_is_counted_and_not_shown() -> None:
    generation = Generation()
    generation.push(token("Hello"))
    output = generation.push(EOS, end=FinishReason.STOP)
    assert (output.text, output.token_ids) == ("", (EOS,))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)


def test_stop_token_is_not_shown() -> None:
    generation = Generation(stop_token_ids=(token("!"),))
    output = generation.push(token("a"), token("!"), end=FinishReason.STOP, stop_reason=token("!"))
    assert (output.text, output.stop_reason) == ("a", token("!"))


def test_ignored_eos_goes_on() -> None:
    generation = Generation(ignore_eos=True)
    assert generation.push(EOS).text == ""
    assert generation.push(token("a")).text == "a"


def test_stop_string_across_tokens() -> None:
    """Bug: "DEF", "G", "HI" were sent before the stop string DEFGHIJ was complete."""
    generation = Generation(stop=("DEFGHIJ",))
    shown = [generation.push(*tokens(text)).text for text in ("ABC", "DEF", "G", "HI")]
    output = generation.push(token("J"))
    assert shown == ["ABC", "", "", ""]
    assert (output.text, output.finish_reason, output.stop_reason) == (
        "",
        FinishReason.STOP,
        "DEFGHIJ",
    )


def test_held_text_comes_when_it_turns_out_harmless() -> None:
    generation = Generation(stop=("STOP",))
    assert generation.push(token("ST")).text == ""
    assert generation.push(token("A")).text == "STA"


def test_text_before_a_stop_string_in_the_same_token() -> None:
    """Bug: a token that held text and the stop string was dropped as a whole."""
    generation = Generation(stop=("STOP",))
    output = generation.push(token("see STOP here"))
    assert (output.text, output.stop_reason) == ("see ", "STOP")


def test_the_prompt_does_not_match() -> None:
    """Bug: a prompt that ends with a stop string confused the matcher."""
    generation = Generation(prompt="ST", stop=("STOP",))
    assert generation.push(token("OP")).text == "OP"


def test_stop_string_of_the_last_allowed_token() -> None:
    generation = Generation(stop=("STOP",), max_tokens=2)
    generation.push(token("ST"))
    output = generation.push(token("OP"), end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", FinishReason.STOP, "STOP")


def test_held_text_is_flushed_at_length() -> None:
    """Bug: with a stop string that began but did not end, the last words of an answer were lost."""
    generation = Generation(stop=("STOP",), max_tokens=1)
    output = generation.push(token("ST"), end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ST", FinishReason.LENGTH, None)


def test_held_text_is_flushed_at_eos() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("ST"))
    output = generation.push(EOS, end=FinishReason.STOP)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ST", FinishReason.STOP, None)


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    generation = Generation()
    half = tokens("𠀀")[:3]
    assert [generation.push(token_id).text for token_id in half[:2]] == ["", ""]
    assert generation.push(half[2], end=FinishReason.LENGTH).text == "\ufffd"


def test_half_a_character_that_completes_a_stop_string() -> None:
    generation = Generation(stop=("a\ufffd",))
    assert generation.push(token("a")).text == ""
    output = generation.push(tokens("é")[0], end=FinishReason.LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", FinishReason.STOP, "a\ufffd")


def test_abort_drops_what_was_held_back() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("ST"))
    output = generation.processor.abort(generation.request)
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.ABORT)
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0)


def test_timing() -> None:
    generation = Generation()
    generation.processor.scheduled(generation.step())
    first = generation.push(token("a")).timing
    generation.processor.scheduled(generation.step())
    last = generation.push(EOS, end=FinishReason.STOP).timing
    assert first is not None and first.queue is not None and first.first_token is not None
    assert last is not None and (last.queue, last.first_token) == (first.queue, first.first_token)
    assert 0 < first.queue <= first.first_token <= first.total <= last.total < 60


def test_an_abort_before_the_first_step_has_no_such_times() -> None:
    generation = Generation()
    timing = generation.processor.abort(generation.request).timing
    assert timing is not None and timing.queue is None and timing.first_token is None and timing.total > 0


def test_the_clock_starts_with_the_submission() -> None:
    """Bug: the time that a request waited for the engine to finish its step was in no metric."""
    request = make_request("r")
    processor = OutputProcessor(TOKENIZER)
    processor.add({"r": processor.state(request, arrival=time.perf_counter() - 1000)})
    timing = processor.abort(request).timing
    assert timing is not None and timing.total >= 1000


def test_gaps_lie_between_tokens() -> None:
    generation = Generation()
    gaps = []
    for _ in range(3):
        processed = generation.take(RequestNews(generation.request, (token("a"),)))
        assert processed is not None
        gaps.append(processed.gap)
    assert gaps[0] is None and all(gap is not None and 0 < gap < 60 for gap in gaps[1:])


def test_an_error_is_the_last_output() -> None:
    generation = Generation(stop=("STOP",))
    generation.push(token("ST"))
    processed = generation.take(RequestNews(generation.request, error="it broke"), end=FinishReason.ERROR)
    assert processed is not None
    assert (processed.output.finish_reason, processed.output.error) == (FinishReason.ERROR, "it broke")
    assert (processed.output.text, processed.output.token_ids) == ("", ())
    with pytest.raises(KeyError):
        generation.push(token("a"))


def test_each_counted_token_has_logprobs() -> None:
    """Also the one that ended the request and leaves no text."""
    generation = Generation(logprobs=2)
    outputs = [generation.push(token("a")), generation.push(EOS, end=FinishReason.STOP)]
    assert [output.logprobs for output in outputs] == [
        (scripted_logprobs(token("a"), 2),),
        (scripted_logprobs(EOS, 2),),
    ]


def test_prompt_logprobs_come_once_and_whole() -> None:
    """The prompt abcdefgh in three chunks; after the second a preemption, so that two come again."""
    generation = Generation(prompt="abcdefgh", prompt_logprobs=1)
    for start, end in ((1, 4), (4, 6), (1, 4), (4, 7)):
        assert generation.take_prompt_logprobs(start, end) is None
    news = RequestNews(
        generation.request, (token("x"),), prompt_start=7, prompt_logprobs=generation.prompt_logprobs(7, 8)
    )
    processed = generation.take(news)
    assert processed is not None
    assert processed.output.prompt_logprobs == (None, *(scripted_logprobs(token(char), 1) for char in "bcdefgh"))
    assert generation.push(token("y")).prompt_logprobs is None


def test_prompt_logprobs_of_one_token() -> None:
    assert Generation(prompt="a", prompt_logprobs=0).push(token("x")).prompt_logprobs == (None,)


def test_a_prompt_alone() -> None:
    generation = Generation(prompt="ab", prompt_logprobs=1, max_tokens=0)
    news = RequestNews(generation.request, prompt_start=1, prompt_logprobs=generation.prompt_logprobs(1, 2))
    processed = generation.take(news, end=FinishReason.LENGTH)
    assert processed is not None
    output = processed.output
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.LENGTH)
    assert output.prompt_logprobs == (None, scripted_logprobs(token("b"), 1))
    assert output.usage == Usage(2, 0, 0) and processed.gap is None


def test_no_prompt_logprobs_unless_asked_for() -> None:
    assert Generation().push(token("x")).prompt_logprobs is None


def test_special_tokens_are_shown_on_request() -> None:
    generation = Generation(ignore_eos=True, skip_special_tokens=False)
    assert generation.push(EOS).text == "<eos>"


def test_min_tokens_holds_for_stop_strings() -> None:
    generation = Generation(stop=("STOP",), min_tokens=3)
    assert generation.push(token("ST")).finish_reason is None
    output = generation.push(token("OP"))
    assert (output.text, output.finish_reason) == ("STOP", None)
    output = generation.push(token("see STOP here"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("see ", FinishReason.STOP, "STOP")


def test_the_stop_string_is_shown_on_request() -> None:
    generation = Generation(stop=("STOP",), include_stop_str_in_output=True)
    output = generation.push(token("see STOP here"))
    assert (output.text, output.stop_reason) == ("see STOP", "STOP")


def test_the_stop_token_is_shown_on_request() -> None:
    generation = Generation(stop_token_ids=(token("!"),), include_stop_str_in_output=True)
    output = generation.push(token("a"), token("!"), end=FinishReason.STOP, stop_reason=token("!"))
    assert (output.text, output.stop_reason) == ("a!", token("!"))


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<bos>")])
def test_a_stop_string_that_is_a_special_token(include: bool, text: str) -> None:
    """Bug: special tokens leave no text, so such a stop string never matched."""
    generation = Generation(stop=("<bos>",), include_stop_str_in_output=include, skip_special_tokens=True)
    bos = TOKENIZER.special_id("<bos>")
    assert bos is not None and generation.request.sampling.stop_token_ids == (bos,)
    output = generation.push(token("a"), bos, end=FinishReason.STOP, stop_reason=bos)
    assert (output.text, output.stop_reason) == (text, "<bos>")


def test_eos_is_never_shown_as_a_stop() -> None:
    generation = Generation(include_stop_str_in_output=True)
    output = generation.push(token("a"), EOS, end=FinishReason.STOP)
    assert (output.text, output.stop_reason) == ("a", None)


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
    generation.processor.add({again.request_id: generation.processor.state(again)})
    processed = generation.processor.process(RequestNews(again, (token("a"),)))
    assert processed is not None and processed.output.text == "a"
