from __future__ import annotations

from typing import Any

import pytest

from miniserve.api.schemas.completions import Completion, CompletionChunk
from miniserve.core.schedule import ScheduledRequest
from tests.api.driver import Answer, Api
from tests.engine.scripted import EOS, token, tokens

SAID = "é你\U0001f600 Hello"
PROMPTS: list[Any] = ["abc", ["abc", "x", "abc"], [64, 65, 66], [[64, 65], [90]], ["a你é", "b"]]


def say(item: ScheduledRequest) -> list[int]:
    """Text that depends on the prompt's length."""
    return [*tokens(f"{item.num_prompt_tokens}{SAID}"), EOS]


def join(answer: Answer) -> dict[int, dict[str, Any]]:
    events = answer.events()
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        CompletionChunk.model_validate(event, strict=True)
        assert event["object"] == "text_completion" and event["id"] == events[0]["id"]
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None
            choice["finish_reason"] = piece["finish_reason"]
            assert piece["finish_reason"] is None or piece["text"] == ""
            choice["text"] += piece["text"]
            if piece["logprobs"] is not None:
                earlier = choice["logprobs"] or {}
                choice["logprobs"] = {name: earlier.get(name, []) + part for name, part in piece["logprobs"].items()}
    return choices


def whole(answer: Answer) -> dict[int, dict[str, Any]]:
    parsed = answer.json()
    Completion.model_validate(parsed, strict=True)
    names = ("text", "logprobs", "finish_reason")
    assert [choice["index"] for choice in parsed["choices"]] == list(range(len(parsed["choices"])))
    return {choice["index"]: {name: choice[name] for name in names} for choice in parsed["choices"]}


def test_a_plain_answer(api: Api) -> None:
    answer = api.complete("abc").json()
    Completion.model_validate(answer, strict=True)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_plain_answer_in_pieces(prompt: Any, n: int, echo: bool, logprobs: int | None) -> None:
    with Api(say) as api:
        asked = {"prompt": prompt, "n": n, "echo": echo, "logprobs": logprobs, "max_tokens": 40}
        api.complete(**asked)
        plain = api.complete(**asked)
        streamed = api.complete(**asked, stream=True, stream_options={"include_usage": True})
        assert join(streamed) == whole(plain)
        assert streamed.events()[-1]["usage"] == plain.json()["usage"]


def test_choices_come_in_the_order_p0n0_p0n1_p1n0_p1n1() -> None:
    with Api(lambda item: [*tokens(str(item.num_prompt_tokens)), EOS]) as api:
        answer = api.complete(["a", "bbb"], n=2).json()
        assert [choice["text"] for choice in answer["choices"]] == ["1", "1", "3", "3"]
        # Each prompt once, all outputs.
        assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 8
        joined = join(api.complete(["a", "bbb"], n=2, stream=True))
        assert [joined[index]["text"] for index in range(4)] == ["1", "1", "3", "3"]


def test_the_default_is_sixteen_tokens() -> None:
    with Api() as api:
        assert api.complete().json()["usage"]["completion_tokens"] == 16
        assert api.complete(stop="zzz", max_tokens=None).json()["usage"]["completion_tokens"] == 16


def test_a_stop_that_spells_a_special_token_matches_by_id() -> None:
    with Api(lambda _: [*tokens("ab"), token("<bos>"), *tokens("cd"), EOS]) as api:
        assert api.complete(stop="<bos>").json()["choices"][0]["text"] == "ab"
        assert api.complete(stop="<bos>", max_tokens=10).json()["choices"][0]["text"] == "ab"
        assert api.complete().json()["choices"][0]["text"] == "abcd"
        assert api.complete(skip_special_tokens=False).json()["choices"][0]["text"] == "ab<bos>cd"


def test_logprobs_zero_still_gives_the_sampled_token(api: Api) -> None:
    """`logprobs: 0` was taken for none."""
    [choice] = api.complete(logprobs=0).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world", "<eos>"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"Hello": -1.0}, {" world": -1.0}, {"<eos>": -1.0}],
        "text_offset": [0, 5, 11],
    }


def test_echo_scores_the_prompt(api: Api) -> None:
    """What evaluation harnesses send: token ids, echo, logprobs, one token or none."""
    asked = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for max_tokens, more in ((1, ["Hello"]), (0, [])):
        answer = api.complete([tokens("abc"), tokens("de")], max_tokens=max_tokens, **asked).json()
        first, second = answer["choices"]
        assert first["text"] == "abc" + "".join(more) and second["text"] == "de" + "".join(more)
        assert first["logprobs"]["tokens"] == ["a", "b", "c", *more]
        assert first["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, *[-1.0 for _ in more]]
        assert first["logprobs"]["top_logprobs"][0] is None and first["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


def test_echo_without_logprobs_is_the_prompt_and_the_answer(api: Api) -> None:
    assert api.complete("abc", echo=True).json()["choices"][0]["text"] == "abcHello world"
    assert api.complete(tokens("a你"), echo=True).json()["choices"][0]["text"] == "a你Hello world"
    assert api.complete("abc", echo=True, max_tokens=0).json()["choices"][0]["text"] == "abc"
    events = api.complete("abc", echo=True, max_tokens=0, stream=True).events()
    assert [event["choices"][0]["text"] for event in events] == ["abc", ""]


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 0}, {"max_tokens": 1}, {"echo": True}, {"n": 2}, {"prompt": ["a", "bc"]}], ids=str
)
def test_token_ids_are_in_each_choice(fields: dict[str, Any]) -> None:
    """In a stream, the prompt's are in a choice's first chunk, whenever that comes: é is half a character at first."""
    with Api(lambda _: [*tokens("é Hello"), EOS]) as api:
        asked = {"prompt": "abc", "return_token_ids": True, **fields}
        plain = api.complete(**asked).json()["choices"]
        pieces = [event["choices"][0] for event in api.complete(**asked, stream=True).events()]
        for choice in plain:
            own = [piece for piece in pieces if piece["index"] == choice["index"]]
            assert [piece.get("prompt_token_ids") for piece in own] == [
                choice["prompt_token_ids"],
                *[None for _ in own[1:]],
            ]
            assert [i for piece in own for i in piece.get("token_ids", [])] == choice["token_ids"]
        assert {len(choice["token_ids"]) for choice in plain} == {fields.get("max_tokens", len(tokens("é Hello")) + 1)}


def test_prompt_logprobs_are_in_each_choice(api: Api) -> None:
    """Beside an echo, each shows as many candidates as were asked for it."""
    for fields, num_prompt, num_echo in (
        ({"prompt_logprobs": 2, "n": 2}, 2, None),
        ({"prompt_logprobs": 0, "echo": True, "logprobs": 3}, 0, 3),
        ({"prompt_logprobs": 3, "echo": True, "logprobs": 1}, 3, 1),
    ):
        for choice in api.complete("abc", max_tokens=1, **fields).json()["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None
            assert [next(iter(entry)) for entry in others] == [str(token_id) for token_id in tokens("bc")]
            assert {len(entry) for entry in others} == {max(1, num_prompt)}
            if num_echo is not None:
                assert len(choice["logprobs"]["top_logprobs"][1]) == num_echo
                assert choice["logprobs"]["tokens"] == ["a", "b", "c", "Hello"]
    assert "prompt_logprobs" not in api.complete("abc", echo=True, logprobs=1).json()["choices"][0]


def test_no_tokens_and_no_echo(api: Api) -> None:
    [choice] = api.complete(max_tokens=0).json()["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "length"


def test_an_empty_prompt_leaves_the_server_alive(api: Api) -> None:
    """An empty prompt killed the engine; the next request was never answered."""
    prompts: tuple[Any, ...] = ("", [""], [], [[]], ["a", ""])
    for prompt in prompts:
        assert api.complete(prompt).status == 400
    assert api.complete("a").status == 200


def test_one_wrong_prompt_of_many_runs_nothing(api: Api) -> None:
    assert api.complete(["a", "b" * 300]).status == 400
    assert api.model.steps == []


def test_a_prompt_that_never_fits_the_cache_is_refused_at_once() -> None:
    """Prompts larger than the cache waited for ever, with health green."""
    with Api(num_blocks=9) as api:
        refused = api.complete("a" * 40)
        assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
        assert api.complete("a", max_tokens=2).status == 200
