"""Histories that could not have been, and final messages with nothing to go on with. The shape of a message is tested
where it is rendered, in test_chat_template.
"""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import InvalidParameterError, RequestError, UnsupportedParameterError
from miniserve.text.messages import check_continuable, check_history, normalise_messages

USER = {"role": "user", "content": "Hi"}


def call(call_id: Any = "1", **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}


def calls(*made: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made)}


def result(call_id: Any = "1", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "42", **fields}


FINE: list[list[dict[str, Any]]] = [
    [USER, calls(call()), result()],
    [USER, {"role": "assistant", "tool_calls": [call()]}, result(content=None), {"role": "assistant", "content": "x"}],
    [USER, calls(call("1"), call("2")), result("2", name="f"), result("1")],
    [USER, calls(call("1"), call("2")), result("2"), USER],
    [USER, calls(call()), USER],
    [USER, calls(call()), result(), calls(call()), result()],
    [{"role": "system", "content": ""}, {**USER, "name": "Ann", "tool_calls": None, "tool_call_id": None}],
    [{**USER, "tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": None, "function_call": None}],
    [USER, {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []}, USER],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
]


@pytest.mark.parametrize("messages", FINE, ids=str)
def test_histories_as_agents_send_them(messages: list[dict[str, Any]]) -> None:
    check_history(messages)


WRONG: list[tuple[dict[str, Any], str]] = [
    (result(None), r"messages\[2\]\.tool_call_id must be the id of the call that it answers, got null"),
    (result(5), r"\.tool_call_id must be .*, got a number"),
    (result(""), r"\.tool_call_id must be "),
    (result("2"), r"messages\[2\]\.tool_call_id is '2', but no message before it has a tool call of this id"),
    (calls(call(None)), r"messages\[2\]\.tool_calls\[0\]\.id must be a non-empty string, got null"),
    (calls(call("")), r"\.id must be a non-empty string, got an empty string"),
    (calls(call("7"), call("7")), r"messages\[2\]\.tool_calls\[1\]\.id is '7' again"),
    ({**USER, "tool_calls": [call()]}, r"messages\[2\]\.tool_calls: only .* 'assistant' call tools; this is of 'user'"),
    ({**USER, "content": None}, r"messages\[2\]\.content of the role 'user' must be text or text parts, got null"),
    ({"role": "user"}, r"\.content of the role 'user' .*, got null"),
    ({**USER, "content": []}, r"got an empty array"),
    ({"role": "system"}, r"\.content of the role 'system' must be text"),
    ({**USER, "name": 5}, r"messages\[2\]\.name must be a string, got a number"),
]


@pytest.mark.parametrize(("message", "words"), WRONG, ids=str)
def test_what_could_not_have_been_is_named(message: dict[str, Any], words: str) -> None:
    """Bug: each was accepted without a word, and the model saw a part of it, or nothing."""
    with pytest.raises(InvalidParameterError, match=words) as caught:
        check_history([USER, calls(call()), message])
    assert caught.value.param == "messages"


def test_a_result_comes_after_its_call() -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[1\]\.tool_call_id is '1', but no message before it"):
        check_history([USER, result(), calls(call())])


def test_a_refusal_is_text() -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[0\]\.refusal must be a string"):
        normalise_messages([{"role": "assistant", "refusal": 5}])


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_what_no_template_reads_is_refused(field: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=rf"messages\[0\]\.{field} is not implemented; send "):
        check_history([{"role": "assistant", "content": "x", field: {"id": "1"}}])


@pytest.mark.parametrize(
    ("final", "words"),
    [
        (USER, "its role is 'user'"),
        (calls(call()), "it calls tools"),
        ({**calls(call()), "content": "Let me see"}, "it calls tools"),
        ({"role": "assistant", "content": None}, "its content is empty"),
        ({"role": "assistant", "content": "", "reasoning_content": "Hm"}, "its content is empty"),
        ({"role": "assistant", "content": [{"type": "text", "text": ""}]}, "its content is empty"),
    ],
)
def test_nothing_to_go_on_with(final: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_continuable(normalise_messages([USER, final]))
    assert caught.value.param == "continue_final_message"
    check_continuable(normalise_messages([USER, {"role": "assistant", "content": "It is "}]))
