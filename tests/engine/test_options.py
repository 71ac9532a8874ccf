"""What options may not be, found before any model is asked, and what follows from those that contradict nothing."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.engine.options import ChatOptions, RequestOptions
from miniserve.errors import InvalidParameterError
from miniserve.text.parsers.base import Tool

CAT, DOG = Tool("cat"), Tool("dog")
WRONG_KWARGS: tuple[Any, ...] = ("x", 5, [], None)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required; got 'sometimes'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tool_choice": "required", "tool_name": "cow", "tools": (CAT, DOG)}, "tool_choice", "'cow'.*cat, dog"),
        ({"tool_choice": "required", "tool_name": "cow"}, "tool_choice", "'cow'.*none"),
        ({"tool_name": "cat", "tools": (CAT,)}, "tool_choice", "tool_choice is auto, but names a function"),
        ({"reasoning_effort": "maximal"}, "reasoning_effort", "minimal, low, .*got 'maximal'"),
        ({"continue_final_message": True}, "continue_final_message", "exclude each other"),
        *(
            ({name: value}, name, "must be true or false, got ")
            for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message", "add_special_tokens")
            for value in ("x", 1, None)
        ),
        *(({"template_kwargs": wrong}, "chat_template_kwargs", "must be an object, got ") for wrong in WRONG_KWARGS),
    ],
)
def test_chat_options_that_are_wrong(options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words) as caught:
        ChatOptions(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("none", {"enable_thinking": True}),
        ("none", {"thinking": True}),
        ("none", {"enable_thinking": None}),
        ("high", {"enable_thinking": False}),
        ("low", {"thinking": False}),
        ("high", {"thinking": 0}),
        ("high", {"reasoning_effort": "low"}),
    ],
)
def test_an_effort_and_a_variable_that_contradict_each_other(effort: str, variables: dict[str, Any]) -> None:
    """Bug: one won without a word; or the model was said to reason always."""
    [name] = variables
    with pytest.raises(
        InvalidParameterError, match=f"{effort}.*chat_template_kwargs has {name} = .*contradict"
    ) as error:
        ChatOptions(reasoning_effort=effort, template_kwargs=variables)
    assert error.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("none", {"enable_thinking": False, "reasoning_effort": "none"}),
        ("high", {"enable_thinking": True, "thinking": 7, "other": False}),
        (None, {"enable_thinking": False, "reasoning_effort": "high"}),
    ],
)
def test_an_effort_and_variables_that_agree(effort: str | None, variables: dict[str, Any]) -> None:
    assert ChatOptions(reasoning_effort=effort, template_kwargs=variables).template_kwargs == variables


@pytest.mark.parametrize(
    ("options", "offered", "demanded", "max_calls"),
    [
        ({}, (CAT, DOG), (), None),
        ({"tool_choice": "none"}, (), (), None),
        ({"tool_choice": "required"}, (CAT, DOG), (CAT, DOG), None),
        ({"tool_choice": "required", "tool_name": "dog"}, (CAT, DOG), (DOG,), 1),
        ({"parallel_tool_calls": False}, (CAT, DOG), (), 1),
    ],
)
def test_tools_that_are_offered_and_demanded(
    options: dict[str, Any], offered: tuple[Tool, ...], demanded: tuple[Tool, ...], max_calls: int | None
) -> None:
    chat = ChatOptions(tools=(CAT, DOG), **options)
    assert (chat.offered_tools, chat.demanded_tools, chat.max_calls) == (offered, demanded, max_calls)


@pytest.mark.parametrize(
    "options",
    [
        *({"cache_salt": salt} for salt in ("", "x" * 257, 7, "\ud83d")),
        *({"priority": priority} for priority in (2**31, -(2**31) - 1, 1.0, True, "1", 10**5000)),
        *({"truncate_prompt_tokens": kept} for kept in (0, -2, 2**31, True, 1.5, 10**5000)),
    ],
)
def test_request_options_that_are_wrong(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidParameterError, match=name) as caught:
        RequestOptions(**options)
    assert caught.value.param == name and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"cache_salt": "x"},
        {"cache_salt": "é" * 256},
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
        {"truncate_prompt_tokens": 1},
        {"truncate_prompt_tokens": -1},
    ],
)
def test_request_options_at_their_limits(options: dict[str, Any]) -> None:
    RequestOptions(**options)
