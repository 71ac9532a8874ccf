from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from miniserve.api.schemas.chat import ChatCompletion
from miniserve.config import ServerConfig
from miniserve.core.schedule import ScheduledRequest
from tests.api.answers import join, whole
from tests.api.driver import CHAT, MODEL, Api
from tests.engine.scripted import EOS, PIECES, TOKENIZER, token, tokens

SAID = "é你\U0001f600 “naïve” \u2028\x85 Daenerys is the Khaleesi"


def say(text: str) -> Any:
    return lambda _: [*tokens(text), EOS]


def by_choice(item: ScheduledRequest) -> list[int]:
    """The choices of a prompt say different things: forks have ids that end in their number."""
    return [*tokens(f"I am {item.request_id.rpartition('-')[2][:2]}"), EOS]


def test_a_plain_answer(api: Api) -> None:
    answer = api.chat().json()
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello world", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    prompt_tokens = len(tokens("user: hi\n"))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3,
        "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert api.chat(model="alias").json()["model"] == "alias"
    # The second time, the prompt's whole blocks come from the cache.
    assert api.chat().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens // 4 * 4


def test_a_stream_chunk_by_chunk(api: Api) -> None:
    events = api.chat(stream=True).events()
    assert all("usage" not in event for event in events)
    role, *content, end = [event["choices"] for event in events]
    assert role == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert end == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    # A reader who is slower than the engine gets several tokens in one chunk.
    texts = [choice["delta"].pop("content") for [choice] in content]
    assert "".join(texts) == "Hello world" and all(texts)
    assert all(choices == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}] for choices in content)


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 5},
        {"stop": "is the"},
        {"stop": ["naïve” \u2028", "zzz"]},
        {"stop": "Khaleesi and more"},
        {"stop": "ve”", "include_stop_str_in_output": True},
        {"ignore_eos": True, "max_tokens": 90, "skip_special_tokens": False},
    ],
)
def test_a_stream_is_the_plain_answer_in_pieces(fields: dict[str, Any], n: int, logprobs: dict[str, Any]) -> None:
    """U+FFFD only when streaming; one letter replaced when logprobs were on; the only token lost."""
    with Api(say(SAID)) as api:
        asked = fields | logprobs | {"n": n}
        plain = api.chat(**asked)
        api.chat(**asked)  # so that both of the next find the same prefix in the cache
        plain = api.chat(**asked)
        streamed = api.chat(**asked, stream=True, stream_options={"include_usage": True})
        assert join(streamed) == whole(plain)
        assert sorted(whole(plain)) == list(range(n))
        *chunks, last = streamed.events()
        assert last["choices"] == [] and last["usage"] == plain.json()["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)


def test_text_is_the_scripts_whatever_the_characters() -> None:
    with Api(say(SAID)) as api:
        for answer in (whole(api.chat()), join(api.chat(stream=True))):
            assert answer[0]["content"] == SAID
        # Clients split lines at more than line feeds: everything beyond ASCII is escaped.
        assert api.chat(stream=True).body.isascii()


def test_a_half_character_at_the_end_is_shown_once() -> None:
    with Api(lambda _: [*tokens("a你")[:-1], EOS]) as api:
        assert whole(api.chat())[0]["content"] == join(api.chat(stream=True))[0]["content"] == "a\ufffd"


def test_a_model_that_stops_at_once_still_says_so() -> None:
    with Api(lambda _: [EOS]) as api:
        events = api.chat(stream=True).events()
        assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]
        assert api.chat().json()["choices"][0]["message"]["content"] == ""
        # The end token has its entry all the same, in a chunk of its own before the last.
        logprobs = join(api.chat(stream=True, logprobs=True))[0]["logprobs"]
        assert [entry["token"] for entry in logprobs["content"]] == ["<eos>"]
        assert logprobs == whole(api.chat(logprobs=True))[0]["logprobs"]


def test_one_token_is_content_and_then_the_end(api: Api) -> None:
    """With max_tokens 1 the only token of a stream was lost."""
    events = api.chat(stream=True, max_tokens=1).events()
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "Hello", None]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_nothing_that_may_become_a_stop_is_shown() -> None:
    """Parts of a stop string were sent before it was complete."""
    with Api(say("ABC DEFGHIJ KLM")) as api:
        events = api.chat(stream=True, stop="DEFGHIJ").events()
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "ABC "
        assert events[-1]["choices"][0]["stop_reason"] == "DEFGHIJ"
        assert api.chat(stop="DEFGHIK").json()["choices"][0]["message"]["content"] == "ABC DEFGHIJ KLM"


def test_a_stop_token_is_reported(api: Api) -> None:
    [choice] = api.chat(stop_token_ids=[token(" world")]).json()["choices"]
    assert choice["message"]["content"] == "Hello" and choice["stop_reason"] == token(" world")


def test_choices_are_numbered_and_each_ends_once() -> None:
    """With n = 2 the index was always 0."""
    with Api(by_choice) as api:
        plain, streamed = whole(api.chat(n=3)), join(api.chat(n=3, stream=True))
        assert [choice["content"] for _, choice in sorted(plain.items())][1:] == ["I am 1", "I am 2"]
        assert [choice["content"] for _, choice in sorted(streamed.items())][1:] == ["I am 1", "I am 2"]
        answer = api.chat(n=3).json()
        # The prompt once, the output of all.
        assert answer["usage"]["prompt_tokens"] == len(tokens("user: hi\n"))
        assert answer["usage"]["completion_tokens"] >= 3 * 7


def test_usage_in_every_chunk(api: Api) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = api.chat(stream=True, stream_options=options).events()
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, 3)
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    without_last = api.chat(stream=True, stream_options={"continuous_usage_stats": True}).events()
    assert all(event["choices"] and event["usage"] for event in without_last)


def test_logprobs_of_a_plain_answer(api: Api) -> None:
    [choice] = api.chat(logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " world", "<eos>"]
    assert content[0]["bytes"] == list(b"Hello") and len(content[0]["top_logprobs"]) == 2
    assert [entry["top_logprobs"] for entry in api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
        [],
    ]


def test_max_completion_tokens_wins(api: Api) -> None:
    fields = {"max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    assert api.chat(**fields).json()["usage"]["completion_tokens"] == 2


def test_without_max_tokens_the_rest_of_the_context_is_used() -> None:
    with Api() as api:
        usage = api.chat().json()["usage"]
        assert usage["total_tokens"] == 256


def test_content_parts_are_the_string_and_null_is_empty(api: Api) -> None:
    def prompt_tokens(*messages: dict[str, Any]) -> int:
        usage = api.post(CHAT, {"messages": list(messages)}).json()["usage"]
        count: int = usage["prompt_tokens"]
        return count

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    assert prompt_tokens({"role": "user", "content": parts}) == prompt_tokens({"role": "user", "content": "abc"})
    assert prompt_tokens({"role": "assistant", "content": None}) == len(tokens("assistant: \n"))
    assert prompt_tokens({"role": "assistant"}) == len(tokens("assistant: \n"))
    assert prompt_tokens({"role": "developer", "content": "a"}) == len(tokens("system: a\n"))


def test_what_a_message_says_is_text_and_no_special_token(api: Api) -> None:
    usage = api.post(CHAT, {"messages": [{"role": "user", "content": "<eos>"}]}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens("user: ")) + len("<eos>") + 1


def test_sampling_reaches_the_engine(api: Api) -> None:
    fields: dict[str, Any] = {
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100},
        "seed": 11,
        "stop": "x",
        "stop_token_ids": [3],
        "min_tokens": 2,
        "max_tokens": 4,
    }
    api.chat(**fields)
    sampling = api.model.steps[0].scheduled[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields | {
        "logit_bias": {5: -100},
        "stop": ("x",),
        "stop_token_ids": (3,),
    }
    # What the request does not name comes from the model's generation config, here a temperature of 0.5.
    assert sampling.temperature == 0.5 and sampling.logprobs is None
    api.model.steps.clear()
    api.chat(temperature=0)
    assert api.model.steps[0].scheduled[0].sampling.temperature == 0


def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "line one\nsecret " + "x" * 3000}], "max_tokens": 1, "seed": 42}
    for wanted in (False, True):
        caplog.clear()
        config = ServerConfig(api_key=(), log_requests=wanted)
        with Api(config=config, max_model_len=4096, num_blocks=1100) as api, caplog.at_level(logging.DEBUG):
            answer = api.post(CHAT, body)
            assert answer.status == 200
        lines = [record.getMessage() for record in caplog.records if "secret" in record.getMessage()]
        assert len(lines) == wanted
        if wanted:
            [line] = lines
            assert answer.json()["id"] in line and "seed=42" in line and "\n" not in line
            assert 2000 < len(line) < 2400


def test_the_scripts_pieces_are_what_these_tests_think() -> None:
    assert json.dumps(PIECES[:2]) == '["Hello", " world"]' and TOKENIZER.bos_token_id is not None
