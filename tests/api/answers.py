"""Chat answers as a client puts them together: of a stream and of a plain one, comparable with each other."""

from __future__ import annotations

from typing import Any

from miniserve.api.schemas.chat import ChatCompletion, ChatCompletionChunk
from tests.api.driver import Answer

MESSAGE = ("content", "reasoning_content", "reasoning", "tool_calls")


def join(answer: Answer) -> dict[int, dict[str, Any]]:
    """A stream's choices; checks the rules of chunks."""
    events = answer.events()
    for part in ("id", "created", "model"):
        assert len({event[part] for event in events}) == 1
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
        assert event["object"] == "chat.completion.chunk"
        for piece in event["choices"]:
            first = piece["index"] not in choices
            assert ("role" in piece["delta"]) == first, "the role comes once, first"
            choice = choices.setdefault(piece["index"], {"content": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "nothing comes after the finish reason"
            choice["finish_reason"] = piece["finish_reason"]
            assert piece["finish_reason"] is None or piece["delta"] == {}
            add_delta(choice, piece["delta"])
            if piece["logprobs"] is not None:
                earlier = choice["logprobs"] or {"content": []}
                choice["logprobs"] = {"content": earlier["content"] + piece["logprobs"]["content"]}
            if "stop_reason" in piece:
                choice["stop_reason"] = piece["stop_reason"]
    for choice in choices.values():
        if "tool_calls" in choice and not choice["content"]:
            choice["content"] = None
    return choices


def add_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    assert len(delta.keys() - {"role"}) <= 1 or delta.keys() == {"reasoning_content", "reasoning"}
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            choice[name] = choice.get(name, "") + delta[name]
    assert "reasoning" not in delta or not choice["content"], "reasoning comes first"
    for part in delta.get("tool_calls", ()):
        calls = choice.setdefault("tool_calls", [])
        if "id" in part:
            assert part["index"] == len(calls) and part["function"]["arguments"] == ""
            calls.append({name: part[name] for name in ("id", "type")} | {"function": dict(part["function"])})
        else:
            assert part["index"] == len(calls) - 1 and part.keys() == {"index", "function"}
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]


def whole(answer: Answer) -> dict[int, dict[str, Any]]:
    """A plain answer's choices."""
    parsed = answer.json()
    ChatCompletion.model_validate(parsed, strict=True)
    return {
        choice["index"]: {
            **{name: choice["message"][name] for name in MESSAGE if name in choice["message"]},
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in parsed["choices"]
    }


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The same without the ids of calls, which are new in every answer; each is there, and no two are the same."""
    ids = [call.pop("id") for choice in choices.values() for call in choice.get("tool_calls", ())]
    assert all(ids) and len(set(ids)) == len(ids)
    return choices
