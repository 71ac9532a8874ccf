"""Tools for a model whose template knows none: told in the system message, with the history as text."""

from __future__ import annotations

import json

from miniserve.text.chat_template import ChatTemplate
from miniserve.text.parsers.base import Message, Tool
from miniserve.text.parsers.generic import GenericFormat
from miniserve.text.parsers.hermes import HermesFormat
from miniserve.text.tokenizer import Tokenizer
from tests.support import embedded_gguf
from tests.text.parsers.reading import Answer, read

TOOL = Tool("get_weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
USER = {"role": "user", "content": "Hi."}
FORMAT = GenericFormat()


def test_the_functions_are_described_in_the_system_message() -> None:
    system, user = FORMAT.with_tools([USER], [TOOL])
    assert user == USER and system["role"] == "system"
    line = next(line for line in system["content"].splitlines() if "get_weather" in line)
    assert json.loads(line) == TOOL.to_openai()["function"]


def test_the_given_system_message_stays_first() -> None:
    for role in ("system", "developer"):
        described, _ = FORMAT.with_tools([{"role": role, "content": "Be brief."}, USER], [TOOL])
        assert described["role"] == role
        assert described["content"].startswith("Be brief.\n\nYou can call")


def test_the_form_that_is_told_is_the_one_that_is_read() -> None:
    content = FORMAT.with_tools([USER], [TOOL])[0]["content"]
    start = content.index("<tool_call>")
    example = content[start : content.index("</tool_call>") + len("</tool_call>")]
    assert read(FORMAT, [example], [TOOL]) == Answer("", [("function_name", '{"parameter": "value"}')])


def test_calls_and_results_become_text() -> None:
    history: list[Message] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "17 °C"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
    ]
    written = FORMAT.with_tools(history, [])
    assert [message["role"] for message in written] == ["user", "assistant", "user", "assistant", "user"]
    assert not any("tool_calls" in message for message in written)
    call = ("get_weather", '{"city": "Köln"}')
    assert read(FORMAT, [written[1]["content"]], [TOOL]) == Answer("", [call, call])
    assert read(FORMAT, [written[3]["content"]], [TOOL]) == Answer("Wait.", [call])
    assert written[4]["content"] == "<tool_response>\n\n</tool_response>"
    prompt = ChatTemplate("{{ messages[2].content }}", {}).render(written)
    assert prompt == "<tool_response>\n17 °C\n</tool_response>\n<tool_response>\nrain\n</tool_response>"


def test_calls_with_odd_arguments_are_still_text() -> None:
    for arguments, text in ((None, "{}"), ("", "{}"), ({"a": 1}, '{"a": 1}'), ('{"cut', '{"cut')):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = FORMAT.with_tools([{"role": "assistant", "tool_calls": [call]}], [])
        assert message["content"] == f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'


def test_malformed_messages_are_left_to_the_template() -> None:
    messages: list[Message] = [{"role": "assistant", "tool_calls": [3]}, {"role": "assistant", "tool_calls": "x"}]
    assert FORMAT.with_tools(messages, []) == messages


def test_a_format_that_the_template_knows_changes_nothing() -> None:
    messages: list[Message] = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert HermesFormat().with_tools(messages, [TOOL]) == messages


def test_the_embedded_model_is_told() -> None:
    tokenizer = Tokenizer.from_gguf(embedded_gguf())
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    prompt = template.render(FORMAT.with_tools([USER], [TOOL]))
    assert '"name": "get_weather"' in prompt and prompt.count("<|im_start|>system") == 1
