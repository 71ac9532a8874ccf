"""Reasoning: shown beside the answer under both of its names, counted, hidden on request, and free of the grammar."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import CHAT, Server, check_error, fold, plain, streamed

OPENED = {"chat_template_kwargs": {"enable_thinking": True}}


def test_the_official_client_finds_it(thinking: Server) -> None:
    messages: Any = [{"role": "user", "content": "<<say <think>why</think>\n\nSo.>>"}]
    create = thinking.openai.chat.completions.create
    message = create(model="scripted", messages=messages).choices[0].message
    assert message.content == "So." and message.model_extra is not None
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "why"
    chunks = list(create(model="scripted", messages=messages, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "why"
    assert "".join(delta.content or "" for delta in deltas) == "So."


@pytest.mark.parametrize(
    ("said", "fields", "reasoning", "text"),
    [
        ("<think>a\nb</think>\n\nc", {}, "a\nb", "c"),
        ("<think></think>c", {}, "", "c"),
        ("no <think>tags</think> here", {}, "", "no <think>tags</think> here"),
        ("a</think>b", {}, "", "a</think>b"),
        ("a</think>b", OPENED, "a", "b"),
        ("never ends", OPENED, "never ends", ""),
        ("a</think>b", {"chat_template_kwargs": {"enable_thinking": False}}, "", "a</think>b"),
        ("<think>stop here</think>and stop there", {"stop": "stop"}, "stop here", "and "),
        ("<think>a</think>b", {"include_reasoning": False}, "", "b"),
    ],
)
def test_what_is_reasoning(thinking: Server, said: str, fields: dict[str, Any], reasoning: str, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": f"<<say {said}>>"}], **fields}
    whole, joined = plain(thinking.post(CHAT, **asked)), fold(thinking.post(CHAT, **streamed(asked)))
    assert joined.content() == whole.content()
    assert (whole.reasonings, whole.texts) == ([reasoning], [text])


def test_it_is_counted_hidden_or_not(thinking: Server) -> None:
    said = "<<say <think>1234</think>56>>"
    for fields in ({}, {"include_reasoning": False}):
        usage = thinking.chat(said, **fields).usage
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>1234</think>")}
        assert usage["completion_tokens"] == len("<think>1234</think>56") + 1
    assert thinking.chat("<<say plain>>").usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_effort(thinking: Server) -> None:
    """`none` closes the reasoning in the prompt, and the others leave the model its way."""
    assert thinking.chat("<<say a</think>b>>", reasoning_effort="none").text == "a</think>b"
    assert thinking.chat("<<say a</think>b>>", reasoning_effort="high").reasonings == ["a"]


def test_the_history_may_have_it_under_either_name(thinking: Server) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "So.", name: "hm"}, {"role": "user", "content": "Hi"}]
        prompt = thinking.post("/tokenize", messages=messages).json()["tokens"]
        text = thinking.post("/detokenize", tokens=prompt).json()["prompt"]
        assert text.startswith("assistant: <think>hm</think>So.\n")


def test_a_grammar_is_for_the_answer_only(thinking: Server) -> None:
    said = '<<say it has {braces}</think>{"a": 1}>>'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for send in (thinking.chat, thinking.chat_stream):
        answer = send(said, structured_outputs={"json": schema}, **OPENED)
        assert (answer.reasonings, answer.texts) == (["it has {braces}"], ['{"a": 1}'])
        assert answer.finish_reason == "stop"


def test_a_tool_may_be_called_after_it(thinking: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    said = '<<say <think>f?</think><tool_call>{"name": "f", "arguments": {}}</tool_call>\n>>'
    for send in (thinking.chat, thinking.chat_stream):
        answer = send(said, tools=[tool])
        assert (answer.reasonings, answer.tool_calls) == (["f?"], [[("f", "{}")]])


def test_variables_that_are_not_the_templates(thinking: Server) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"messages": []}, {"tools": [1]}, {"add_generation_prompt": False})
    for kwargs in wrong:
        response = thinking.post(CHAT, messages=[{"role": "user", "content": "Hi"}], chat_template_kwargs=kwargs)
        check_error(response, 400, "invalid_value", "chat_template_kwargs")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("space", ["", "\n"])
def test_reasoning_is_the_same_whatever_the_grammar(thinking: Server, strict: bool, space: str) -> None:
    """Bug: beside a strict tool, reasoning behind a line break, or spelled in letters, was content, calls and all."""
    tool = {"type": "function", "function": {"name": "f", "strict": strict}}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    said = f"<<say {space}<think>f? {call}</think>Hm. {call}>>"
    for send in (thinking.chat, thinking.chat_stream):
        answer = send(said, tools=[tool])
        assert (answer.reasonings, answer.texts) == ([f"f? {call}"], ["Hm."])
        assert answer.tool_calls == [[("f", "{}")]] and answer.finish_reason == "tool_calls"


def test_a_model_may_reason_before_it_is_held_to_a_structure(thinking: Server) -> None:
    """Bug: with a tag of several tokens, it was kept from that without a word."""
    tool = {"type": "function", "function": {"name": "f"}}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for send in (thinking.chat, thinking.chat_stream):
        answer = send('<<say <think>hm</think>{"a": 1}>>', response_format={"type": "json_object"})
        assert (answer.reasonings, answer.texts) == (["hm"], ['{"a": 1}'])
        answer = send(f"<<say \n<think>hm</think>\n{call}>>", tools=[tool], tool_choice="required", max_tokens=200)
        assert (answer.reasonings, answer.text) == (["hm"], "") and answer.tool_calls[0][0] == ("f", "{}")


def test_half_of_a_tag_is_nothing_where_it_is_cut(thinking: Server) -> None:
    said = '<<say <think>hm</think>{"a": 1}>>'
    for length in range(1, len('<think>hm</think>{"a": 1}')):
        asked = {"response_format": {"type": "json_object"}, "max_tokens": length}
        whole, joined = thinking.chat(said, **asked), thinking.chat_stream(said, **asked)
        assert joined.content() == whole.content() and whole.finish_reason == "length"
        assert (whole.reasonings, whole.text) == (["hm"[: max(0, length - 7)]], '{"a": 1}'[: max(0, length - 17)])
