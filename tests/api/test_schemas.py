from __future__ import annotations

import json
from typing import Any

import pytest

from miniserve.api.schemas.fields import CHAT_REFUSED, COMPLETIONS_REFUSED, IGNORED, TOKENIZE_REFUSED, Refused
from tests.api.driver import CHAT, COMPLETIONS, HELLO, Api

BIG = 2**63
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# field -> values at the edges of what is allowed, and just beyond
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e-9, 2, None], [-0.1, 2.1, "0.5", True, [], {}, 10**400]),
    "top_p": ([1e-6, 1, None], [0, 1.1, -1, "1", False]),
    "top_k": ([-1, 0, 1, 10**6, None], [-2, 1.5, "1", True]),
    "min_p": ([0, 1, None], [-0.1, 1.1, "0"]),
    "presence_penalty": ([-2, 2, None], [-2.1, 2.1, "1"]),
    "frequency_penalty": ([-2, 2, None], [-2.1, 2.1, "1"]),
    "repetition_penalty": ([0.1, 100, None], [0, -1, 100.5, "1"]),
    "n": ([1, 4, None], [0, -1, 129, 1.0, "1", True, 10**30]),
    "max_tokens": ([1, 20, None], [-1, 2**31, 1.5, "1", True, 10**400]),
    "min_tokens": ([0, 3, None], [-1, 2**31, "1"]),
    "seed": ([-BIG, BIG - 1, 0, None], [-BIG - 1, BIG, 1.0, "1", True]),
    "logit_bias": (
        [{}, {"1": -100, "2": 100.0}, {"0": 0}, None, {str(i): 1 for i in range(262)}],
        [{"1": 101}, {"1": "5"}, {"a": 1}, {"": 1}, {"1.0": 1}, {" 1": 1}, {"9" * 30: 1}, [], "x", {"1": None}],
    ),
    "stop": (
        [[], "a", ["a"] * 16, "x" * 512, None],
        ["", [""], ["a", ""], ["a"] * 17, "x" * 513, [1], 1, {"a": 1}, [None], [["a"]]],
    ),
    "stop_token_ids": ([[], [0, 262], None], [[-1], [263], ["1"], [1.0], [True], 1, [BIG], [0] * 1025]),
    "ignore_eos": ([True, False, None], ["true", 1, []]),
    "include_stop_str_in_output": ([True, None], ["true", 1]),
    "skip_special_tokens": ([True, False, None], ["true", 1]),
    "add_special_tokens": ([True, False, None], ["true", 1]),
    "stream": ([False, None], ["true", 1]),
    "stream_options": ([None], [{}, {"include_usage": True}, [], "x"]),
    "model": (["alias", None], [1, ["alias"]]),
    "response_format": (
        [{"type": "text"}, None],
        [
            "json",
            {},
            [],
            1,
            {"type": "xml"},
            {"type": ["text"]},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": []},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
            {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}},
            {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
            {"type": "json_object", "schema": []},
        ],
    ),
    "structured_outputs": (
        [None],
        [
            {},
            "x",
            [],
            {"json": None},
            {"json": 5},
            {"json": "{"},
            {"json": "[]"},
            {"regex": ""},
            {"regex": 1},
            {"choice": []},
            {"choice": "ab"},
            {"choice": ["a", ""]},
            {"choice": ["a", 1]},
            {"grammar": {}},
            {"json_object": "yes"},
            {"regex": "a", "choice": ["a"]},
            {"regex": "a" * (2**17 + 1)},
        ],
    ),
    "prompt_logprobs": ([0, 20, None], [-1, 21, "1", True, 1.0]),
    "return_token_ids": ([True, False, None], ["true", 1]),
    "truncate_prompt_tokens": ([-1, 1, 2**31 - 1, None], [0, -2, "1", 1.0, True, 2**31]),
    "cache_salt": (["a", "\U0001f600" * 256, None], ["", "a" * 257, 1, ["a"]]),
    "priority": ([0, None], ["1", 1.0, True, 2**31, -(2**31) - 1]),
}
ONLY_CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "logprobs": ([True, False, None], [1, "true"]),
    "max_tokens": ([1], [0]),
    "max_completion_tokens": ([1, 20, None], [0, -1, 2**31, "1", 1.0]),
    "tools": (
        [[], None],  # others take more room than this context has
        [
            "f",
            {},
            [1],
            [{}],
            [{"type": "function"}],
            [{"type": "custom", "custom": {"name": "f"}}],
            [{"type": "function", "function": {"name": ""}}],
            [{"type": "function", "function": {"name": "f g"}}],
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            [{"type": "function", "function": {"name": "f", "strict": 1}}],
            [FUNCTION, FUNCTION],
            [FUNCTION] * 129,
        ],
    ),
    "tool_choice": (
        ["none", "auto", None],
        ["required", "any", "", 1, [], {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    ),
    "parallel_tool_calls": ([True, False, None], ["true", 1]),
    "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh", "max", None], ["", "huge", 1, True, []]),
    "reasoning": (
        [{"effort": "none"}, {"effort": None}, {}, None],
        [{"effort": "huge"}, {"effort": 1}, "low", [], True],
    ),
    "include_reasoning": ([True, False, None], ["true", 1]),
    "chat_template_kwargs": (
        [
            {},
            {"nobody_reads_this": [1, {"a": None}]},
            {"enable_thinking": None, "thinking": False},
            {"thinking": 7},
            None,
        ],
        [
            [],
            "x",
            1,
            {"messages": []},
            *({"enable_thinking": "false"}, {"enable_thinking": ""}, {"enable_thinking": 1}, {"enable_thinking": []}),
            *({"thinking": "false"}, {"thinking": [True]}),
        ],
    ),
    "add_generation_prompt": ([True, False, None], ["true", 1]),
    "continue_final_message": ([False, None], ["true", 1, True]),
    "messages": (
        [
            [{"role": "developer", "content": "a"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": None}],
            [{"role": "user", "content": ""}],
        ],
        [
            [],
            None,
            "hi",
            [1],
            [{}],
            [{"role": "user", "content": 1}],
            [{"content": "a"}],
            [{"role": 1}],
            {"role": "user"},
        ],
    ),
}
ONLY_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "logprobs": ([0, 20, None], [-1, 21, True, "1", 1.0]),
    "max_tokens": ([0], []),
    "echo": ([True, False, None], ["true", 1]),
    "best_of": ([1, None], [0, "1"]),
    "prompt": (
        ["a", ["a", "b"], [1, 2], [[1], [2]], ["a"] * 10],
        [
            "",
            [],
            [""],
            ["a", ""],
            [[]],
            [[1], []],
            None,
            1,
            {},
            [1, "a"],
            [[1], "a"],
            [1.0],
            [True],
            [-1],
            [263],
            [[263]],
        ],
    ),
}


def _cases(bounds: dict[str, tuple[list[Any], list[Any]]], path: str) -> list[tuple[str, str, Any, bool]]:
    return [
        (path, name, value, allowed)
        for name, edges in bounds.items()
        for values, allowed in zip(edges, (True, False), strict=True)
        for value in values
    ]


CASES = [
    *_cases(BOUNDS, CHAT),
    *_cases(ONLY_CHAT, CHAT),
    *_cases(BOUNDS, COMPLETIONS),
    *_cases(ONLY_COMPLETIONS, COMPLETIONS),
]


def test_every_bound(api: Api) -> None:
    """A value beyond is a 400 that names the field, never a 500 and never a guess."""
    for path, name, value, allowed in CASES:
        needed = HELLO if path == CHAT else {"prompt": "abc"}
        answer = api.post(path, {**needed, name: value})
        shown = (path, name, json.dumps(value)[:80], answer.status, answer.body[:300])
        if allowed:
            assert answer.status == 200, shown
        else:
            assert answer.status == 400 and answer.error["type"] == "invalid_request_error", shown
            assert answer.error["param"].partition("[")[0] == name and name in answer.error["message"], shown
            assert answer.error["code"] == "invalid_value", shown


def test_top_logprobs_need_logprobs(api: Api) -> None:
    for number in (1, 20):
        assert api.chat(logprobs=True, top_logprobs=number).status == 200
        assert api.chat(top_logprobs=number).error["param"] == "top_logprobs"
    wrong_values: tuple[Any, ...] = (21, -1, True, "1")
    for value in wrong_values:
        assert api.chat(logprobs=True, top_logprobs=value).error["param"] == "top_logprobs"
    assert api.chat(top_logprobs=0).status == 200


def test_logit_bias_has_a_bound_on_its_keys(api: Api) -> None:
    answer = api.chat(logit_bias={str(i): 1 for i in range(1025)})
    assert answer.status == 400 and "1025" in answer.error["message"]


@pytest.mark.parametrize("token_id", [263, 191222, 10**17])
def test_a_token_id_outside_the_vocabulary_is_named(api: Api, token_id: int) -> None:
    """A logit_bias beyond the vocabulary crashed the engine."""
    cases: tuple[tuple[str, Any], ...] = (
        ("logit_bias", {str(token_id): -100}),
        ("stop_token_ids", [token_id]),
        ("prompt", [token_id]),
    )
    for name, value in cases:
        answer = api.post(COMPLETIONS, {"prompt": "a", name: value})
        assert answer.status == 400 and str(token_id) in answer.error["message"]
    assert api.complete().status == 200


def test_choices_are_bounded_per_request(api: Api) -> None:
    assert api.complete(["a"] * 1025).error["param"] == "prompt"
    too_many = api.complete(["a"] * 9, n=128)
    assert too_many.status == 400 and too_many.error["param"] == "n" and "1152" in too_many.error["message"]


def test_a_switch_of_the_template_that_is_text_is_named(api: Api) -> None:
    """Bug: the text "false" turned the reasoning on."""
    for path in (CHAT, "/tokenize"):
        answer = api.post(path, {**HELLO, "chat_template_kwargs": {"enable_thinking": "false"}})
        assert answer.error["param"] == "chat_template_kwargs"
        assert answer.error["message"] == "chat_template_kwargs.enable_thinking must be true or false, got 'false'"


def test_efforts_by_both_names(api: Api) -> None:
    """Bug: `reasoning` was ignored, and with it an effort of none."""
    assert api.chat(reasoning={"effort": "low"}, reasoning_effort="low").status == 200
    answer = api.chat(reasoning={"effort": "none"}, reasoning_effort="low")
    assert answer.error["param"] == "reasoning" and "contradict" in answer.error["message"]
    answer = api.chat(reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True})
    assert answer.error["param"] == "reasoning.effort"
    assert answer.error["message"].startswith("reasoning.effort is 'none', but")
    for key in ("max_tokens", "exclude", "summary"):
        answer = api.chat(reasoning={"effort": "low", key: 5})
        assert answer.brief()[2] == "unsupported_parameter" and answer.error["param"] == "reasoning"
        assert f"reasoning.{key} is not implemented" in answer.error["message"]


def test_other_words_for_reasoning_are_told_ours(api: Api) -> None:
    """Bug: budgets and switches of other servers were ignored, and the model reasoned on."""
    for name, value in (("thinking_token_budget", 10), ("thinking", {"type": "disabled"}), ("enable_thinking", False)):
        for path, remedy in ((CHAT, "leave it out, or send reasoning_effort"), (COMPLETIONS, "leave it out")):
            answer = api.post(path, {**(HELLO if path == CHAT else {"prompt": "a"}), name: value})
            assert answer.error["message"] == f"{name} is not implemented; {remedy}"


def test_min_tokens_over_max_tokens(api: Api) -> None:
    assert api.complete(max_tokens=2, min_tokens=3).error["param"] == "min_tokens"


def test_fields_that_exclude_each_other(api: Api) -> None:
    answer = api.chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert answer.status == 400 and "response_format and structured_outputs" in answer.error["message"]
    assert (
        api.chat(response_format={"type": "text"}, structured_outputs={"choice": []})
        .error["message"]
        .startswith("structured_outputs")
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for path in (CHAT, "/tokenize"):
        both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
        assert "exclude each other" in api.post(path, both).error["message"]
        assert api.post(path, both | {"add_generation_prompt": None}).status == 200
    for path, needed in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        streamed = api.post(path, {**needed, "prompt_logprobs": 1, "stream": True})
        assert streamed.status == 400 and streamed.error["param"] == "prompt_logprobs"


def test_what_structured_outputs_cannot_do_is_named(api: Api) -> None:
    for key in ("structural_tag", "whitespace_pattern", "disable_fallback"):
        answer = api.chat(structured_outputs={"regex": "a", key: True})
        assert answer.error["code"] == "unsupported_parameter" and key in answer.error["message"]


def test_priority_needs_its_scheduling_policy(api: Api) -> None:
    answer = api.chat(priority=1)
    assert answer.error["param"] == "priority" and "--scheduling-policy" in answer.error["message"]


def test_stream_options_without_a_stream(api: Api) -> None:
    options = {"include_usage": True}
    for answer in (
        api.chat(stream_options=options),
        api.chat(stream_options=options, stream=False),
        api.chat(stream_options=options, stream=None),
    ):
        assert answer.status == 400 and answer.error["param"] == "stream_options"
    assert api.chat(stream=True, stream_options={"include_obfuscation": False}).status == 200


TABLES: tuple[tuple[str, dict[str, Any], tuple[Refused, ...]], ...] = (
    (CHAT, HELLO, CHAT_REFUSED),
    (COMPLETIONS, {"prompt": "a"}, COMPLETIONS_REFUSED),
    ("/tokenize", {"prompt": "a"}, TOKENIZE_REFUSED),
)


@pytest.mark.parametrize(("path", "needed", "refused"), TABLES)
def test_what_is_not_implemented_is_refused_by_name(
    api: Api, path: str, needed: dict[str, Any], refused: tuple[Refused, ...]
) -> None:
    for rule in refused:
        answer = api.post(path, {**needed, rule.name: {"some": "thing"}})
        assert answer.brief() == (400, "invalid_request_error", "unsupported_parameter")
        assert answer.error["param"] == rule.name and rule.name in answer.error["message"]
        for harmless in (None, *rule.harmless):
            assert api.post(path, {**needed, rule.name: harmless}).status == 200, (rule.name, harmless)


def test_true_is_not_one_and_one_is_not_true() -> None:
    assert Refused("typical_p", (1,)).allows(1.0) and not Refused("typical_p", (1,)).allows(True)
    assert not Refused("echo", (False,)).allows(0)


def test_a_field_of_the_other_endpoint_is_told_as_that(api: Api) -> None:
    """Bug: tools of a completion, or best_of of a chat, were ignored."""
    answer = api.complete(tools=[FUNCTION])
    assert answer.error["message"] == "tools is a field of /v1/chat/completions only; leave it out, or send []"
    answer = api.chat(best_of=3)
    assert answer.error["message"] == "best_of is a field of /v1/completions only; leave it out, or send 1"


def test_best_of_would_have_to_choose(api: Api) -> None:
    assert api.complete(n=2, best_of=2).status == 200
    answer = api.complete(n=1, best_of=3)
    assert answer.error["code"] == "unsupported_parameter" and answer.error["param"] == "best_of"


def test_harmless_fields_are_ignored(api: Api) -> None:
    fields: dict[str, Any] = {name: {"any": ["thing", 1.5, None]} for name in (*IGNORED, "nobody_knows_this")}
    assert api.chat(**fields).status == 200
    assert api.complete(**fields).status == 200


def test_every_field_of_the_sdk_is_taken_or_refused_by_name(api: Api) -> None:
    """A field that nobody thought of was a 500."""
    sdk_fields = {
        "audio": {"voice": "alloy", "format": "mp3"},
        "function_call": {"name": "f"},
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "a"},
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        "web_search_options": {},
    }
    for name, value in sdk_fields.items():
        answer = api.chat(**{name: value})
        assert answer.error["code"] == "unsupported_parameter" and answer.error["param"] == name
