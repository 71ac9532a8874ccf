"""Every field that an SDK can send: ignored where it is harmless, refused by name where it would change the answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import CHAT, COMPLETIONS, Server, check_error, fold, plain

REQUIRED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}

HARMLESS: dict[str, tuple[Any, ...]] = {
    "user": ("me", None),
    "metadata": ({"a": "b"}, None),
    "store": (True, False),
    "service_tier": ("auto", "flex"),
    "safety_identifier": ("abc",),
    "prompt_cache_key": ("abc",),
    "prompt_cache_retention": ("24h",),
    "verbosity": ("low",),
    "nobody_knows_this": ({"deep": [1, 2, {"x": None}]}, 1e300, True),
    "stop": (None, []),
    "seed": (None,),
    "logit_bias": (None, {}),
    "temperature": (None,),
    "n": (None,),
    "max_tokens": (None,),
    "stream": (None, False),
    "stream_options": (None,),
    "model": (None,),
    "response_format": ({"type": "text"}, None),
    "structured_outputs": (None,),
    "priority": (0, None),
    "cache_salt": (None,),
    "prompt_logprobs": (None,),
    "return_token_ids": (False, None),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False, None),
    "length_penalty": (1, 1.0, None),
    "bad_words": ([], None),
    "top_k": (0, -1, None),
}
HARMLESS_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, False),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "low", "high", "none"),
    "reasoning": (None, {}, {"effort": "low"}),
    "include_reasoning": (True, False, None),
    "web_search_options": (None,),
    "chat_template_kwargs": ({}, None, {"enable_thinking": False}),
    "continue_final_message": (False, None),
    "add_generation_prompt": (True, False, None),  # this template knows no such header
    "max_completion_tokens": (None,),
    "logprobs": (None, False),
    "top_logprobs": (None,),
}
HARMLESS_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "suffix": ("", None),
    "best_of": (1, None),
    "echo": (False, None),
    "logprobs": (None,),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, None),
    "messages": (None,),
    "max_completion_tokens": (None,),
}
CASES_HARMLESS = [
    *((path, field, values) for path in REQUIRED for field, values in HARMLESS.items()),
    *((CHAT, field, values) for field, values in HARMLESS_IN_CHAT.items()),
    *((COMPLETIONS, field, values) for field, values in HARMLESS_IN_COMPLETIONS.items()),
]

REFUSED: dict[str, tuple[Any, ...]] = {
    "guided_json": ({"type": "object"},),
    "guided_regex": ("a+",),
    "guided_choice": (["a", "b"],),
    "guided_grammar": ("root ::= 'a'",),
    "use_beam_search": (True,),
    "length_penalty": (0.5, 2),
    "bad_words": (["damn"],),
    "allowed_token_ids": ([1, 2],),
    "logits_processors": (["x"],),
}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, {"type": "custom"}),
    "functions": ([{"name": "f"}],),
    "function_call": ({"name": "f"},),
    "audio": ({"voice": "alloy", "format": "mp3"},),
    "modalities": (["text", "audio"], ["audio"]),
    "prediction": ({"type": "content", "content": "Hi"},),
    "web_search_options": ({},),
    "thinking": ({"type": "disabled"},),
    "enable_thinking": (False,),
    "thinking_token_budget": (0, 100),
    "chat_template": ("{{ messages }}",),
    "documents": ([{"text": "x"}],),
    "echo": (True,),
    "best_of": (2,),
    "prompt": ("Hi",),
    "suffix": ("the end",),
}
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "messages": ([{"role": "user", "content": "Hi"}], []),
    "tools": ([{"type": "function", "function": {"name": "f"}}],),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "functions": ([{"name": "f"}],),
    "reasoning_effort": ("low", "none"),
    "reasoning": ({"effort": "low"},),
    "include_reasoning": (False,),
    "chat_template_kwargs": ({"enable_thinking": False},),
    "continue_final_message": (True,),
    "add_generation_prompt": (True,),
    "max_completion_tokens": (5,),
    "top_logprobs": (3,),
    "suffix": ("the end",),
    "best_of": (2, 128),
    "prompt_embeds": ("AAAA",),
}
CASES_REFUSED = [
    *((path, field, values) for path in REQUIRED for field, values in REFUSED.items()),
    *((CHAT, field, values) for field, values in REFUSED_IN_CHAT.items()),
    *((COMPLETIONS, field, values) for field, values in REFUSED_IN_COMPLETIONS.items()),
]


def ids(cases: list[tuple[str, str, tuple[Any, ...]]]) -> list[str]:
    return [f"{path[4:]}-{field}" for path, field, _ in cases]


@pytest.mark.parametrize(("path", "field", "values"), CASES_HARMLESS, ids=ids(CASES_HARMLESS))
def test_harmless(scripted: Server, path: str, field: str, values: tuple[Any, ...]) -> None:
    without = plain(scripted.post(path, **REQUIRED[path]))
    for value in values:
        answer = plain(scripted.post(path, **REQUIRED[path], **{field: value}))
        assert answer.content() == without.content()
        if not field.startswith("stream"):
            fields = {**REQUIRED[path], "stream": True, field: value}
            assert fold(scripted.post(path, **fields), include_usage=False).texts == without.texts


@pytest.mark.parametrize(("path", "field", "values"), CASES_REFUSED, ids=ids(CASES_REFUSED))
def test_refused(scripted: Server, path: str, field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        for stream in (False, True):
            response = scripted.post(path, **REQUIRED[path], stream=stream, **{field: value})
            assert field in check_error(response, 400, "unsupported_parameter", field)


def test_all_that_the_sdk_can_name_at_once(scripted: Server) -> None:
    """Every parameter of the official client that is harmless, in one call through it."""
    answer = scripted.openai.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        logprobs=True,
        max_completion_tokens=5,
        metadata={"a": "b"},
        modalities=["text"],
        n=1,
        parallel_tool_calls=True,
        presence_penalty=0.1,
        prompt_cache_key="x",
        response_format={"type": "text"},
        safety_identifier="x",
        seed=1,
        service_tier="auto",
        stop=["zzz"],
        store=False,
        temperature=0.5,
        tool_choice="none",
        tools=[],
        top_logprobs=2,
        top_p=0.9,
        user="me",
        verbosity="low",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        },
    )
    assert answer.choices[0].message.content == "user:"


def test_authorization_without_keys_is_ignored(scripted: Server) -> None:
    for value in ("Bearer abc", "Basic xyz", "nonsense", ""):
        response = scripted.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers={"Authorization": value})
        assert response.status_code == 200


# Messages


def echoed(server: Server, *messages: dict[str, Any]) -> str:
    """The prompt that the template made of the messages; the scripted model repeats it."""
    return plain(server.post(CHAT, messages=list(messages))).text


def test_content_parts_equal_the_string(scripted: Server) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert echoed(scripted, {"role": "user", "content": [parts[0]]}) == "user: one \n"
    joined = echoed(scripted, {"role": "user", "content": parts})
    assert "one " in joined and "two" in joined


@pytest.mark.parametrize("empty", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_null_content_is_empty(scripted: Server, empty: dict[str, Any]) -> None:
    """Bug kinds: the word None in the prompt; an assistant's turn without the key was an error."""
    text = echoed(scripted, {"role": "assistant", **empty}, {"role": "user", "content": "Hi"})
    assert text == "assistant: \nuser: Hi\n"


def test_an_assistants_tool_calls_in_the_history(scripted: Server) -> None:
    """Bug kinds: tool_calls without content, or null, or with arguments "null", were a 500."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "null"}}
    user, tool = {"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "1", "content": "42"}
    contents: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""}, {"content": "x"})
    for content in contents:
        # This template knows no tools: a result is the user's, as text.
        text = echoed(scripted, user, {"role": "assistant", "tool_calls": [call], **content}, tool)
        assert text.endswith("user: <tool_response>\n42\n</tool_response>\n")
    empty: tuple[Any, ...] = (None, [])
    for nothing in empty:
        assert echoed(scripted, {"role": "assistant", "content": "x", "tool_calls": nothing}, user) == (
            "assistant: x\nuser: Hi\n"
        )


def test_a_history_that_could_not_have_been(scripted: Server) -> None:
    """Bug: a result of no call was the user's text."""
    user, tool = {"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "1", "content": "42"}
    for messages, where in (
        ([user, tool], "messages[1].tool_call_id"),
        ([user, {"role": "assistant", "content": "x"}, tool], "messages[2].tool_call_id"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{**user, "name": 5}], "messages[0].name"),
    ):
        response = scripted.post(CHAT, messages=messages)
        assert check_error(response, 400, "invalid_value", "messages").startswith(where)


def test_the_developer_is_the_system(server: Server) -> None:
    user = {"role": "user", "content": "Hi"}
    ids = [
        server.post("/tokenize", messages=[{"role": role, "content": "Be brief"}, user]).json()["tokens"]
        for role in ("developer", "system")
    ]
    assert ids[0] == ids[1]
    assert server.post(CHAT, messages=[{"role": "developer", "content": "x"}, user], max_tokens=1).status_code == 200


def test_special_tokens_in_a_message_are_text(scripted: Server) -> None:
    """What a user spells like an end token neither ends anything nor becomes one token."""
    text = "a<eos>b<bos>"
    assert echoed(scripted, {"role": "user", "content": text}) == f"user: {text}\n"
    tokens = scripted.post("/tokenize", messages=[{"role": "user", "content": text}]).json()["tokens"]
    assert len(tokens) == len(f"user: {text}\n")


def test_special_tokens_in_a_message_to_the_real_model(real: Server) -> None:
    def ids(content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        tokens: list[int] = real.post("/tokenize", messages=messages).json()["tokens"]
        return tokens

    [end] = real.post("/tokenize", prompt="<|im_end|>").json()["tokens"]
    assert ids("a<|im_end|>b").count(end) == ids("ab").count(end)


def test_conversations_in_any_script(scripted: Server) -> None:
    text = "äöü Привет 你好 مرحبا \U0001f468‍\U0001f469‍\U0001f467 \u2028\x00\x7f"
    assert echoed(scripted, {"role": "user", "content": text}) == f"user: {text}\n"
    assert scripted.chat_stream(text).text == f"user: {text}\n"
