"""Tokens that a grammar leaves no choice for, on the embedded model: the same answers in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from miniserve.outputs import RequestOutput
from miniserve.structured.compiler import Matcher

WORD = {"type": "string", "minLength": 1, "maxLength": 12}


def record(**properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "record", "schema": schema, "strict": True}}


FORMATS = (
    record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(favourite_colour={"enum": ["dark green", "dark blue"]}, is_it_true={"type": "boolean"}),
    record(
        kind={"const": 'a rather long constant, with "quotes" and café'},
        tags={"type": "array", "items": WORD, "maxItems": 2},
    ),
    record(outer=record(inner=WORD)["json_schema"]["schema"]),
)


QUESTION = [{"role": "user", "content": "Make up a record."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", device="cpu", max_model_len=256, num_kv_blocks=100)


def answers(llm: LLM, **sampling: Any) -> tuple[list[RequestOutput], int]:
    """All formats at once, and the steps that they took."""
    engine = llm.parts.engine
    steps = 0
    compute = engine._compute

    def counted(step: Any) -> Any:
        nonlocal steps
        steps += 1
        return compute(step)

    engine._compute = counted  # type: ignore[method-assign]
    try:
        outputs = [
            output
            for each in FORMATS
            for output in llm.chat(QUESTION, SamplingParams(max_tokens=60, **sampling), response_format=each)
        ]
    finally:
        engine._compute = compute  # type: ignore[method-assign]
    return outputs, steps


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_the_same_answers_in_fewer_steps(llm: LLM, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    together, fewer_steps = answers(llm, **sampling)
    monkeypatch.setattr(Matcher, "forced", lambda self: ())
    one_by_one, steps = answers(llm, **sampling)
    for output, expected in zip(together, one_by_one, strict=True):
        assert (output.text, output.token_ids, output.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
    assert fewer_steps < 0.9 * steps
