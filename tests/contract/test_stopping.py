"""Where an answer ends, and what is shown of its end. The scripted model says exactly what a case needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import Answer, Server


def both_ways(server: Server, prompt: Any, **fields: Any) -> Answer:
    """The stream, which must equal the plain answer."""
    whole, joined = server.complete(prompt, **fields), server.complete_stream(prompt, **fields)
    assert joined.content() == whole.content()
    assert joined.stop_reasons == whole.stop_reasons
    return joined


ALPHABET = "Here is the English alphabet: ABC<<say DEFGHIJKLM>>"


def test_nothing_of_a_stop_string_is_sent(scripted: Server) -> None:
    """Bug kind: "DEF", "G" and "HI" went out before the stop string was complete."""
    answer = both_ways(scripted, ALPHABET, stop="DEFGHIJ", max_tokens=40)
    assert (answer.text, answer.finish_reason, answer.stop_reasons) == ("", "stop", ["DEFGHIJ"])
    assert "".join(answer.pieces[0]) == ""
    assert answer.num_tokens == len("DEFGHIJ")


def test_a_stop_string_over_many_tokens(scripted: Server) -> None:
    """Bug kind: a stop string of several tokens was never found."""
    answer = both_ways(scripted, "<<say A B C D E O P Q R S>>", stop=["O P Q"], max_tokens=40)
    assert (answer.text, answer.finish_reason) == ("A B C D E ", "stop")


@pytest.mark.parametrize("prompt", ["User: hi\nAssistant:\n<<say fine>>", "fine<<say fine>>", "<<say fine>>fin"])
def test_stop_strings_do_not_see_the_prompt(scripted: Server, prompt: str) -> None:
    """Bug kind: a prompt that ends with a stop string confused the matcher."""
    answer = both_ways(scripted, prompt, stop=["User:\n", "Assistant:\n", "finfine"], max_tokens=40)
    assert (answer.text, answer.finish_reason) == ("fine", "stop")


def test_text_before_a_stop_inside_a_token(scripted: Server) -> None:
    """ "see STOP here" is one token."""
    answer = both_ways(scripted, "<<say I see STOP here now>>", stop="STOP", max_tokens=40)
    assert (answer.text, answer.finish_reason) == ("I see ", "stop")
    assert answer.num_tokens == 3


def test_what_looked_like_a_stop_comes_in_the_end(scripted: Server) -> None:
    """Held back as a possible stop, and shown when it is none: at the answer's end, at the limit."""
    answer = both_ways(scripted, "<<say a DEFGH>>", stop="DEFGHIJ", max_tokens=40)
    assert (answer.text, answer.finish_reason, answer.stop_reasons) == ("a DEFGH", "stop", [None])
    answer = both_ways(scripted, "<<say a DEFGHIJK>>", stop="DEFGHIJ", max_tokens=6)
    assert (answer.text, answer.finish_reason) == ("a DEFG", "length")


def test_the_last_allowed_token_completes_a_stop(scripted: Server) -> None:
    answer = both_ways(scripted, "<<say abcd>>", stop="cd", max_tokens=4)
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_the_earliest_of_several_stops(scripted: Server) -> None:
    answer = both_ways(scripted, "<<say one two three>>", stop=["three", "two", "wo"], max_tokens=40)
    assert (answer.text, answer.stop_reasons) == ("one ", ["two"])


def test_the_stop_string_is_shown_on_request(scripted: Server) -> None:
    fields = {"max_tokens": 40, "include_stop_str_in_output": True}
    assert both_ways(scripted, "<<say ab cd ef>>", stop="cd", **fields).text == "ab cd"
    assert both_ways(scripted, "<<say I see STOP here>>", stop="STOP", **fields).text == "I see STOP"


def test_stop_strings_per_choice(scripted: Server) -> None:
    answer = both_ways(scripted, ["<<say a|b>>", "<<say c>>", "<<say |>>"], stop="|", max_tokens=40, n=2)
    assert answer.texts == ["a", "a", "c", "c", "", ""]


def test_a_stop_string_that_is_a_special_token_matches_by_id(scripted: Server) -> None:
    bos = scripted.post("/tokenize", prompt="<bos>").json()["tokens"]
    answer = both_ways(scripted, f"<<ids 65,66,{bos[0]},67>>", stop=["<bos>"], max_tokens=40)
    assert (answer.text, answer.finish_reason, answer.num_tokens) == (answer.text[:2], "stop", 3)
    assert len(answer.text) == 2


def test_stop_token_ids(scripted: Server) -> None:
    [stop] = scripted.tokens("c")
    answer = both_ways(scripted, "<<say abcd>>", stop_token_ids=[stop], max_tokens=40)
    assert answer.text in ("ab", "abc") and answer.finish_reason == "stop"
    assert (answer.num_tokens, answer.stop_reasons) == (3, [stop])


def test_min_tokens(scripted: Server) -> None:
    """Neither the end token nor a stop ends the answer before."""
    [stop] = scripted.tokens("b")
    assert both_ways(scripted, "<<say ab>>", min_tokens=5, max_tokens=9).text == "ab..."
    answer = both_ways(scripted, "<<say abcabc>>", min_tokens=4, stop="b", max_tokens=9)
    assert (answer.text, answer.num_tokens) == ("abca", 5)
    answer = both_ways(scripted, "<<say abcabc>>", min_tokens=3, stop_token_ids=[stop], max_tokens=9)
    assert answer.num_tokens == 5 and answer.text.startswith("a.ca")
    for reason in ("stop", "length"):
        answer = both_ways(scripted, "<<say ab>>", min_tokens=9, max_tokens=9 + (reason == "stop"))
        assert answer.finish_reason == reason


def test_ignore_eos(scripted: Server) -> None:
    answer = both_ways(scripted, "<<say ab>>", ignore_eos=True, max_tokens=5)
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("ab", "length", 5)
    answer = both_ways(scripted, "<<say ab>>", ignore_eos=True, stop="b", max_tokens=5)
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_the_end_token_is_counted_and_not_shown(scripted: Server) -> None:
    answer = both_ways(scripted, "<<say ab>>", max_tokens=40, logprobs=0)
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("ab", 3, "stop")
    assert answer.logprobs[0] is not None and len(answer.logprobs[0]) == 3


def test_special_tokens_are_shown_on_request(scripted: Server) -> None:
    bos = scripted.post("/tokenize", prompt="<bos>").json()["tokens"]
    prompt = f"<<ids 65,{bos[0]},66>>"
    hidden, shown = (both_ways(scripted, prompt, skip_special_tokens=skip, max_tokens=3) for skip in (True, False))
    assert len(hidden.text) == 2 and shown.text == f"{hidden.text[0]}<bos>{hidden.text[1]}"


# Characters of several tokens


def test_a_character_over_several_tokens(scripted: Server) -> None:
    """Bug kind: replacement characters, only when streaming."""
    text = "Привет 你好 \N{GRINNING FACE}"
    answer = both_ways(scripted, f"<<bytes {text.encode().hex()}>>", max_tokens=100)
    assert answer.text == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in answer.pieces[0])


@pytest.mark.parametrize(
    ("data", "limit", "text"),
    [
        ("e4bda0", 2, "\ufffd"),  # cut by the limit
        ("41e4bd", 9, "A\ufffd"),  # cut by the end
        ("f09f9841", 9, "\ufffdA"),
        ("80", 9, "\ufffd"),
        ("ff41", 9, "\ufffdA"),
    ],
)
def test_half_a_character(scripted: Server, data: str, limit: int, text: str) -> None:
    """Shown once, as one replacement character."""
    assert both_ways(scripted, f"<<bytes {data}>>", max_tokens=limit).text == text


def test_logprobs_have_the_bytes_of_half_a_character(scripted: Server) -> None:
    """Bug kinds: tokens shown in the tokenizer's own alphabet; a letter replaced when logprobs are on."""
    text = "ы你"
    prompt = f"<<bytes {text.encode().hex()}>>"
    for answer in (
        scripted.chat(prompt, logprobs=True, top_logprobs=1),
        scripted.chat_stream(prompt, logprobs=True, top_logprobs=1),
    ):
        assert answer.text == text and answer.logprobs[0] is not None
        entries = answer.logprobs[0][: len(text.encode())]
        assert [entry["bytes"] for entry in entries] == [[byte] for byte in text.encode()]
        assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)
        assert all(entry["token"].isascii() for entry in entries)
    answer = both_ways(scripted, prompt, logprobs=1, max_tokens=9)
    assert answer.text == text


def test_a_prompt_that_ends_in_half_a_character(scripted: Server) -> None:
    """Bug kind: the whole prompt was sent again."""
    half = [*scripted.tokens("<<bytes bda0>>abc"), *scripted.tokens("你")[:1]]
    answer = both_ways(scripted, half, max_tokens=40)
    assert "abc" not in answer.text and len(answer.text) <= 2


# The real model


def test_stop_strings_with_the_real_model(real: Server) -> None:
    """Cut out of the model's own words, across the borders of its tokens."""
    prompt = "Here is the English alphabet: ABC"
    golden = real.complete(prompt, temperature=0, max_tokens=10, logprobs=0)
    first, second = (len("".join(golden.tokens[:at])) for at in (3, 6))
    stop = golden.text[first + 1 : second + 1]
    answer = both_ways(real, prompt, temperature=0, max_tokens=10, stop=["never", stop])
    assert answer.text == golden.text[: golden.text.index(stop)] and answer.finish_reason == "stop"


def test_the_real_model_ends_by_itself(real: Server) -> None:
    ended = real.chat("Say only: Hi", temperature=0, max_tokens=40)
    assert ended.finish_reason == "stop" and ended.num_tokens < 40
    longer = real.chat("Say only: Hi", temperature=0, max_tokens=ended.num_tokens + 2, ignore_eos=True)
    assert longer.text.startswith(ended.text) and longer.finish_reason == "length"
