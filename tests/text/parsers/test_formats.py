"""Which format a chat template gets."""

from __future__ import annotations

import json

import pytest

from miniserve.text.chat_template import ChatTemplate
from miniserve.text.parsers.base import Message, Tool
from miniserve.text.parsers.formats import find_format
from miniserve.text.tokenizer import Tokenizer
from tests.support import embedded_gguf
from tests.text.parsers.reading import Answer, read
from tests.text.qwen3 import qwen3_folder

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "generic"),
        ("{{ messages }}", "generic"),
        (TOOLS, "generic"),
        (TOOLS + '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        (TOOLS + r"{{ '<tool_call>\n{\"name\": \"' + name + '\", \"arguments\": ' }}", "hermes"),
        (TOOLS + "<tool_call>\n<function=name>\n<parameter=key>", "qwen_coder"),
        (TOOLS + "<tool_call>name\n<arg_key>key</arg_key>", "generic"),
        (TOOLS + "[TOOL_CALLS] [", "mistral"),
        (TOOLS + "[TOOL_CALLS]name[ARGS]", "mistral_args"),
        (TOOLS + "<|eot_id|>" + r'{{ \'{"name": function name, "parameters": arguments}\' }}', "llama3"),
        (TOOLS + "<|tool_calls_begin|>function", "generic"),
        # A template that only has the marks in its words, and takes no tools.
        ("[TOOL_CALLS] are not supported", "generic"),
    ],
)
def test_a_template_is_recognised(template: str | None, name: str) -> None:
    assert find_format(template).name == name


def test_the_embedded_model_knows_no_tools() -> None:
    tool_format = find_format(Tokenizer.from_gguf(embedded_gguf()).chat_template)
    assert tool_format.name == "generic" and not tool_format.told_by_template


def test_qwen3_is_hermes() -> None:
    """And reads back the calls that its template writes into a history."""
    settings = json.loads((qwen3_folder() / "tokenizer_config.json").read_text())
    tool_format = find_format(settings["chat_template"])
    assert tool_format.name == "hermes" and tool_format.told_by_template
    calls = [{"function": {"name": "f", "arguments": json.dumps({"a": index})}} for index in range(2)]
    messages: list[Message] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "So:", "tool_calls": calls},
    ]
    tools = [Tool("f")]
    prompt = ChatTemplate(settings["chat_template"], {}).render(messages, tools=[tool.to_openai() for tool in tools])
    answer = prompt.rpartition("</think>")[2].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert read(tool_format, [answer], tools) == Answer("\n\nSo:", [("f", '{"a": 0}'), ("f", '{"a": 1}')])
