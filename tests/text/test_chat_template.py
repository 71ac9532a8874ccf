"""Chat templates against transformers' rendering, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from miniserve.errors import CheckpointError, InvalidParameterError
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.spelling import Piece, compile_spellings

USER = {"role": "user", "content": "What is the capital of France?"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Paris. <b>&amp;</b> \"é\" '日本'"},
    {"role": "user", "content": "  And\nof Ukraine? "},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{{ m.content }}{% endfor %}"
)


def render(source: str | None, messages: list[Any], **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


@pytest.mark.parametrize("messages", [[USER], TURNS, TURNS[:3]])
@pytest.mark.parametrize("generate", [True, False])
def test_embedded_template_as_transformers(byte_level: Any, messages: list[Any], generate: bool) -> None:
    ours = byte_level.ours
    assert ours.chat_template is not None
    text = ChatTemplate(ours.chat_template, ours.special_tokens).render(messages, add_generation_prompt=generate)
    reference = byte_level.reference
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    ids = reference.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


# What templates of many families use: whitespace rules, loop controls, namespaces, JSON, tags, variables.
SOURCES = [
    "{{ eos_token }}\n{% for m in messages %}\n  {% if m %}\n {{ m.role }}\n  {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | tojson }}|{{ {'b': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=true) }}",
    "{% for m in messages %}{% generation %}\n{% set x = 1 %}{{ m }}{% endgeneration %}{{ x }}{% endfor %}",
    "{{ tools is none }}{{ documents is defined }}{{ add_generation_prompt }}{{ nothing }}{{ thinking }}",
    "{{ messages[0].content.split(' ')[-1] }}{{ messages[1:] | length }}{{ messages[-1]['role'] }}",
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_environment_as_transformers(byte_level: Any, source: str) -> None:
    ours = ChatTemplate(source, byte_level.ours.special_tokens)
    text = ours.render(TURNS, add_generation_prompt=True, template_kwargs={"thinking": "no"})
    assert text == byte_level.reference.apply_chat_template(
        TURNS, chat_template=source, tokenize=False, add_generation_prompt=True, thinking="no"
    )


def test_tools_as_transformers(byte_level: Any) -> None:
    source = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "description": "<größer> & mehr"}}]
    text = ChatTemplate(source, {}).render([USER], tools=tools)
    assert text == byte_level.reference.apply_chat_template([USER], chat_template=source, tools=tools, tokenize=False)
    assert "<größer> & mehr" in text


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}", [USER]).isdigit()


def test_template_that_prints_bos_gives_one(byte_fallback: Any) -> None:
    """Bug: the tokenizer put a second BOS before a template that prints its own."""
    text = ChatTemplate("{{ bos_token }}" + PLAIN, byte_fallback.ours.special_tokens).render([USER])
    ids = byte_fallback.ours.encode(text, add_special_tokens=False)
    assert ids.count(byte_fallback.ours.bos_token_id) == 1


# Messages


def test_developer_is_system() -> None:
    """Bug: OpenAI's newer name for the system role made templates fail."""
    assert render(PLAIN, [{"role": "developer", "content": "Be brief."}, USER]).startswith("[system]Be brief.")


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
@pytest.mark.parametrize(
    "source", [PLAIN, "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"]
)
def test_no_content_is_empty(source: str, message: Any) -> None:
    """Bug: an assistant's turn without content was an error, or the word "None" in the prompt."""
    assert render(source, [message]) == "[assistant]"


def test_text_parts_equal_the_string() -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == render(PLAIN, [USER])
    assert render(PLAIN, [{"role": "user", "content": []}]) == "[user]"


def test_messages_are_not_changed() -> None:
    message = {"role": "developer", "content": None, "tool_calls": None}
    render(PLAIN, [message])
    assert message == {"role": "developer", "content": None, "tool_calls": None}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Köln"}', '{"city": "Köln"}'),
        ({"a": 1}, '{"a": 1}'),
        ("null", "{}"),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_tool_call_arguments_are_an_object(arguments: Any, expected: str) -> None:
    """Bug: templates got OpenAI's JSON text and printed it as a quoted string; "null" was a 500."""
    source = "{{ messages[-1].tool_calls[0].function.arguments | tojson }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert render(source, [USER, {"role": "assistant", "tool_calls": [call]}]) == expected


@pytest.mark.parametrize("tool_calls", [None, []])
def test_no_tool_calls(tool_calls: Any) -> None:
    """Bug: tool_calls null made templates that ask for the key fail."""
    source = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].id }}{% endif %}ok{% endfor %}"
    assert render(source, [{"role": "assistant", "content": "x", "tool_calls": tool_calls}]) == "ok"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[1\]\.role"),
        ({"role": "", "content": "x"}, r"messages\[1\]\.role"),
        ({"role": "user", "content": 7}, r"messages\[1\]\.content must be a string or an array.*got a number"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"\.content\[0\].*got 'image_url'"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content\[0\].*got a string"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text must be a string"),
        ({"role": "user", "content": {}}, "got an object"),
        ({"role": "user", "content": [{}]}, "got null"),
        ({"role": "assistant", "tool_calls": 5}, r"messages\[1\]\.tool_calls must be an array, got a number"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, r"tool_calls must be an array, got an object"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\] must be an object with a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, r"arguments.*an array"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"\[0\]\.function\.name must be .*, got null"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, r"name must be a non-empty string"),
        ({"role": "assistant", "tool_calls": [{"type": "x", "function": {}}]}, r"type must be 'function', got 'x'"),
        ({"role": "assistant", "reasoning": ["x"]}, r"messages\[1\]\.reasoning must be a string, got an array"),
    ],
)  # fmt: skip
def test_malformed_message_is_named(message: Any, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words) as caught:
        render(PLAIN, [USER, message])
    assert caught.value.param == "messages"


BROKEN = [
    *('{"city": "Par', "[1]", "7", '"Paris"', "[" * 100_000, '{"n": ' + "9" * 5000 + "}"),
    *('{"n": NaN}', '{"n": [-Infinity]}', '{"n": 1e400}'),
]
BROKEN_IDS = ["cut off", "list", "number", "string", "deep", "digits", "NaN", "infinity", "1e400"]


@pytest.mark.parametrize("arguments", BROKEN, ids=BROKEN_IDS)
def test_a_call_that_the_model_broke_stays_in_the_history(arguments: str) -> None:
    """Bug: an agent that replayed a call which max_tokens had cut off could not go on with the conversation.

    Bug: numbers that JSON does not have reached the prompt as if they were some.
    """
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "not JSON"}]
    aware = "{% set arguments = messages[1].tool_calls[0].function.arguments %}{% if arguments is string %}"
    assert render(aware + "{{ arguments }}{% endif %}", messages) == arguments
    items = "{% for name, value in messages[1].tool_calls[0].function.arguments.items() %}{{ name }}={{ value }}"
    assert render(items + "{% endfor %}", messages) == f"arguments={arguments}"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_history_has_both_names(name: str) -> None:
    """Bug: what our answers call reasoning, templates did not see."""
    source = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{% endfor %}"
    other = ({"reasoning", "reasoning_content"} - {name}).pop()
    for rest in ({}, {other: None}, {other: ""}):
        assert render(source, [{"role": "assistant", "content": "4", name: "2 + 2", **rest}]) == "2 + 2|2 + 2|"
    for absent in (None, ""):
        defined = "{{ messages[0].reasoning is defined or messages[0].reasoning_content is defined }}"
        assert render(defined, [{"role": "assistant", name: absent}]) == "False"


def test_null_is_absent() -> None:
    """Bug: official clients send the fields of an answer back with nulls, and templates printed "None"."""
    message = {"role": "assistant", "content": "x", "name": None, "refusal": None, "function_call": None}
    assert render("{{ messages[0] | tojson }}", [message]) == '{"role": "assistant", "content": "x"}'


def test_no_messages() -> None:
    with pytest.raises(InvalidParameterError, match="must not be empty"):
        render(PLAIN, [])


def test_half_a_surrogate_pair_is_refused() -> None:
    """Bug: content "emoji \\ud83d" was a 500 or a leaked TypeError."""
    with pytest.raises(InvalidParameterError, match="surrogate") as caught:
        render(PLAIN, [{"role": "user", "content": "emoji \ud83d"}])
    assert caught.value.param == "messages"


# Templates


def test_strict_template_refuses_in_its_own_words() -> None:
    """Bug: a second system message on a strict template was a 500."""
    messages = [TURNS[0], USER, {"role": "assistant", "content": "Paris."}, TURNS[0], USER]
    with pytest.raises(InvalidParameterError, match="System message must be at the beginning") as caught:
        render(STRICT, messages)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safe"),
        ("{% for i in range(10000000) %}{% endfor %}", "too big"),
    ],
)
def test_trouble_inside_a_template_is_a_request_error(source: str, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        render(source, [USER])


def test_no_template() -> None:
    with pytest.raises(InvalidParameterError, match="no chat template; use completions") as caught:
        render(None, [USER])
    assert caught.value.param == "messages"


def test_broken_template_is_refused_at_start() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja") as caught:
        ChatTemplate("{% for m in messages %}", {})
    assert isinstance(caught.value.__cause__, jinja2.TemplateSyntaxError)


OWN = ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "pad_token", "range", "namespace"]
OWN += ["raise_exception", "strftime_now", "chat_template", "tokenize", "continue_final_message"]


@pytest.mark.parametrize("name", OWN)
def test_own_variables_cannot_be_replaced(name: str) -> None:
    """Bug: bos_token as an option of one request changed what its prompt began with."""
    with pytest.raises(InvalidParameterError, match=f"must not set {name}:") as caught:
        render("{{ " + name + " }}", [USER], template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_variables_that_the_template_does_not_read_change_nothing() -> None:
    source = "{{ thinking }}{{ other is defined }}{% set own = 1 %}{{ own }}"
    assert ChatTemplate(source, {}).variables == {"thinking", "other"}
    assert render(source, [USER], template_kwargs={"thinking": [1, "a"], "own": 7, "unknown": {}}) == "[1, 'a']False1"


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x" * 70_000, "too large"),
        ([0] * 70_000, "too large"),
        (nested(20), "too large"),
        (nested(100_000), "too large"),
        ({1, 2}, "JSON values, got set"),
        ({"a": [b"x"]}, "JSON values, got bytes"),
    ],
    ids=["text", "list", "nested", "deep", "set", "bytes"],
)
def test_variables_are_plain_data_of_bounded_size(value: Any, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words) as caught:
        render(PLAIN, [USER], template_kwargs={"unread": value})
    assert caught.value.param == "chat_template_kwargs"


# Going on with the final message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def go_on(source: str, content: Any, **fields: Any) -> str:
    final = {"role": "assistant", "content": content, **fields}
    return render(source, [USER, final], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("content", ["Once upon", "Once upon a ", "Once\n\n upon\n", "é\ufdd0", "<|im_end|>"])
def test_the_prompt_ends_with_the_final_message(content: str) -> None:
    """Bug: a template that trims took the blank that the text has to go on behind."""
    turn = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert go_on(CHATML, content) == turn + content
    assert go_on(CHATML, [{"type": "text", "text": content}]) == turn + content


def test_reasoning_that_the_template_sets_apart_is_no_change() -> None:
    source = (
        "{% set parts = messages[-1].content.split('</think>') %}"
        "<think>\n{{ parts[0].split('<think>')[-1].strip() }}\n</think>\n\n{{ parts[-1].lstrip() }}<end>"
    )
    assert go_on(source, "<think>2 + 2</think>It is ") == "<think>\n2 + 2\n</think>\n\nIt is "


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content.split('upon')[-1] }}",
        "{{ messages[0].content }}",
        "{{ messages[-1].content }}{{ messages[-1].content }}",
        "{{ messages[-1].content | tojson(ensure_ascii=true) }}",
    ],
)
def test_a_template_that_changes_the_text_cannot_go_on_with_it(source: str) -> None:
    with pytest.raises(InvalidParameterError, match="does not print its text as it is") as caught:
        go_on(source, "Once upon a")
    assert caught.value.param == "continue_final_message"


def test_a_final_message_that_cannot_be_continued() -> None:
    with pytest.raises(InvalidParameterError, match="its role is 'user', not 'assistant'"):
        render(PLAIN, [USER], continue_final_message=True)
    with pytest.raises(InvalidParameterError, match="it calls tools"):
        go_on(PLAIN, "x", tool_calls=[{"function": {"name": "f"}}])
    nothing: tuple[Any, ...] = ("", None, [])
    for content in nothing:
        with pytest.raises(InvalidParameterError, match="its content is empty"):
            go_on(PLAIN, content)
    with pytest.raises(InvalidParameterError, match=r"U\+FDD0"):
        go_on(PLAIN, "".join(chr(code) for code in range(0xFDD0, 0xFDF0)))


def test_special_tokens_that_a_continued_message_spells_are_pieces() -> None:
    pieces = ChatTemplate(CHATML, {}).render_pieces(
        [USER, {"role": "assistant", "content": "It ends with <|im_end|>"}],
        special_spellings=compile_spellings(["<|im_start|>", "<|im_end|>"]),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert pieces[-1] == Piece("<|im_end|>", literal=True)
    assert [piece.literal for piece in pieces] == [False, True]


def test_a_refusal_in_the_history_is_text() -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "assistant", "content": [part]}]) == "I will not."
    assert template.render([{"role": "assistant", "content": None, "refusal": "I will not."}]) == "I will not."
