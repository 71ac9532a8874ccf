"""Every field's limits, from both sides, and the field that the error names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, "1", None]
NOT_INTEGERS: list[Any] = [1.0, True, "1", math.nan]
# JSON knows integers of any length.
HUGE = 10**400

VALID: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2),
    ("temperature", 0.7),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("min_p", 0),
    ("min_p", 1),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 10**30),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 1e-9),
    ("repetition_penalty", 100),
    ("logit_bias", {0: -100, 5: 100.0}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES), 1)),
    ("max_tokens", 0),
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("min_tokens", 16),
    ("logprobs", 0),
    ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", 0),
    ("max_tokens", None),
    ("seed", -MAX_SEED - 1),
    ("seed", MAX_SEED),
    ("stop", ("x",) * MAX_STOP_STRINGS),
    ("stop", ("x" * MAX_STOP_STRING_LENGTH,)),
    ("stop_token_ids", (0, 10**9)),
]
INVALID: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-1e-9, 2.0001, HUGE, -HUGE, *NOT_NUMBERS)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, HUGE, *NOT_NUMBERS)],
    *[("min_p", value) for value in (-0.1, 1.0001, HUGE, *NOT_NUMBERS)],
    *[("top_k", value) for value in (-2, None, *NOT_INTEGERS)],
    *[("presence_penalty", value) for value in (-2.01, 2.01, HUGE, *NOT_NUMBERS)],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, HUGE, *NOT_NUMBERS)],
    *[("repetition_penalty", value) for value in (0, -1, 100.1, HUGE, *NOT_NUMBERS)],
    *[("logit_bias", value) for value in ({-1: 0}, {1.0: 0}, {3: 100.1}, {3: math.nan}, {3: "1"}, [3], None)],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1)),
    *[("max_tokens", value) for value in (-1, HUGE, *NOT_INTEGERS)],
    *[("min_tokens", value) for value in (-1, 17, HUGE, None, *NOT_INTEGERS)],
    *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, HUGE, *NOT_INTEGERS)],
    *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, HUGE, *NOT_INTEGERS)],
    *[("seed", value) for value in (MAX_SEED + 1, -MAX_SEED - 2, *NOT_INTEGERS)],
    ("stop", "one string"),
    ("stop", ("",)),
    ("stop", ("a", "")),
    ("stop", (5,)),
    ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
    ("stop", ("x" * (MAX_STOP_STRING_LENGTH + 1),)),
    *[("stop_token_ids", (3, value)) for value in (-1, *NOT_INTEGERS)],
    ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
]


@pytest.mark.parametrize(("field", "value"), VALID)
def test_valid(field: str, value: Any) -> None:
    params: dict[str, Any] = {field: value}
    assert getattr(SamplingParams(**params), field) == value


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_invalid(field: str, value: Any) -> None:
    params: dict[str, Any] = {field: value}
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**params)
    assert caught.value.param == field
    assert caught.value.status == 400
    assert field.partition("_")[0] in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_message_has_the_value_and_the_limits() -> None:
    with pytest.raises(InvalidParameterError, match=r"temperature must be a number in \[0, 2\], got 2.5"):
        SamplingParams(temperature=2.5)
    with pytest.raises(InvalidParameterError, match=r"top_p must be a number in \(0, 1\], got 0"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidParameterError, match=r"max_tokens must be an integer in \[0, 2147483647\], got -1"):
        SamplingParams(max_tokens=-1)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": GREEDY_TEMPERATURE}, True),
        ({"temperature": GREEDY_TEMPERATURE * 1.01}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
    ],
)
def test_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [5, "x", None])
def test_a_list_of_a_wrong_type(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name
