from __future__ import annotations

from miniserve.api.logprobs import (
    MIN_LOGPROB,
    ChatLogprobs,
    CompletionLogprobs,
    Entry,
    format_prompt_logprobs,
    token_text,
)
from miniserve.outputs import TokenLogprobs
from tests.engine.scripted import EOS, TOKENIZER, token, tokens

INFINITY = float("inf")


def entries(token_ids: list[int]) -> list[Entry]:
    return [(token_id, TokenLogprobs(token_id, -0.5)) for token_id in token_ids]


def test_text_of_a_token() -> None:
    """Tokens of Chinese text were shown in the alphabet of a byte-level tokenizer."""
    assert token_text(" 你".encode()) == " 你"
    assert token_text(b"\xe4\xbd") == "\\xe4\\xbd"
    assert token_text(b"\xe4\xbd", prefix="bytes:") == "bytes:\\xe4\\xbd"
    assert token_text(b"") == ""


def test_chat_entries_have_the_true_bytes() -> None:
    [half] = ChatLogprobs(TOKENIZER).format(entries(tokens("é")[:1]))["content"]
    assert half == {"token": "\\xc3", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []}


def test_minus_infinity_is_a_number_that_json_has() -> None:
    """-inf is not JSON: logprobs with top_k 1 were a 500."""
    a, b = token("a"), token("b")
    entry: Entry = (a, TokenLogprobs(a, -INFINITY, ((b, -INFINITY),)))
    [chat] = ChatLogprobs(TOKENIZER).format([entry])["content"]
    assert chat["logprob"] == chat["top_logprobs"][0]["logprob"] == MIN_LOGPROB
    completion = CompletionLogprobs(TOKENIZER, skip_special=True).format([entry])
    assert completion["token_logprobs"] == [MIN_LOGPROB]
    assert completion["top_logprobs"] == [{"b": MIN_LOGPROB, "a": MIN_LOGPROB}]


def test_the_token_itself_is_among_the_candidates_once() -> None:
    a, b = token("a"), token("b")
    top = ((b, -0.1), (a, -0.2))
    formatted = CompletionLogprobs(TOKENIZER, skip_special=True).format([(a, TokenLogprobs(a, -0.2, top))])
    assert formatted["top_logprobs"] == [{"b": -0.1, "a": -0.2}]


def test_offsets_count_characters_not_bytes_and_no_skipped_tokens() -> None:
    ids = [*tokens("aé"), EOS, token("Hello"), token("b")]
    assert CompletionLogprobs(TOKENIZER, skip_special=True).format(entries(ids))["text_offset"] == [0, 1, 1, 2, 2, 7]
    shown = CompletionLogprobs(TOKENIZER, skip_special=False).format(entries(ids))
    assert shown["text_offset"] == [0, 1, 1, 2, 7, 12]


def test_offsets_go_on_from_piece_to_piece() -> None:
    ids = tokens("é你b")
    whole = CompletionLogprobs(TOKENIZER, skip_special=True).format(entries(ids))
    pieces = CompletionLogprobs(TOKENIZER, skip_special=True)
    parts = [pieces.format(entries([token_id])) for token_id in ids]
    assert whole == {name: [item for part in parts for item in part[name]] for name in whole}


def test_a_bos_that_is_not_in_the_prompts_text_moves_no_offset() -> None:
    [bos] = tokens("<bos>")
    ids = [bos, *tokens("ab")]
    prompt: list[Entry] = [(bos, None), *entries(ids[1:])]
    spelled = len("<bos>ab")
    formatter = CompletionLogprobs(
        TOKENIZER, skip_special=True, start=2 - spelled, end_of_prompt=2, num_prompt_tokens=3
    )
    formatted = formatter.format([*prompt, *entries([token("c"), token("d")])])
    assert formatted["text_offset"] == [0, 0, 1, 2, 3]
    assert formatted["token_logprobs"][0] is None and formatted["top_logprobs"][0] is None


def test_prompt_logprobs_are_by_token_id_with_ranks() -> None:
    a, b, half = token("a"), token("b"), tokens("é")[0]
    prompt: list[Entry] = [
        (a, None),
        (b, TokenLogprobs(b, -3.5, ((a, -0.1), (half, -0.2)), rank=7)),
        (a, TokenLogprobs(a, -0.1, ((a, -0.1), (b, -INFINITY)))),
    ]
    first, second, third = format_prompt_logprobs(prompt, 2, TOKENIZER)
    assert first is None
    assert second == {
        str(b): {"logprob": -3.5, "rank": 7, "decoded_token": "b"},
        str(a): {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        str(half): {"logprob": -0.2, "rank": 2, "decoded_token": "\\xc3"},
    }
    assert third is not None and list(third) == [str(a), str(b)] and third[str(b)]["logprob"] == MIN_LOGPROB
    assert list(format_prompt_logprobs(prompt, 0, TOKENIZER)[1] or {}) == [str(b)]
