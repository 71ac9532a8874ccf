"""Grammars on the embedded model: what saves steps and masks leaves the answers as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from miniserve.engine.output_text import OutputText
from miniserve.outputs import FinishReason, RequestOutput
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.masks import MaskQuery, MaskWorker, PendingMasks

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


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.7, "seed": 8, "presence_penalty": 1.5, "logit_bias": {34: 5.0}, "min_tokens": 8},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "filters": {"temperature": 1.0, "seed": 9, "top_k": 20, "top_p": 0.9},
}


def check_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert (output.text, output.token_ids, output.finish_reason, output.logprobs) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.logprobs,
        )


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_tokens_that_have_to_come_save_steps(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, fewer_steps = answers(llm, **SAMPLINGS[name])
    query = OutputText.mask_query

    def wants_none(text: OutputText, request_id: str) -> MaskQuery | None:
        asked = query(text, request_id)
        return None if asked is None else replace(asked, wants_forced=False)

    monkeypatch.setattr(OutputText, "mask_query", wants_none)
    one_by_one, steps = answers(llm, **SAMPLINGS[name])
    check_same(together, one_by_one)
    assert fewer_steps < 0.9 * steps


@pytest.mark.parametrize("name", SAMPLINGS)
def test_most_tokens_need_no_mask(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = MaskWorker.start
    num_masks = 0

    def counted(worker: MaskWorker, queries: Sequence[MaskQuery]) -> PendingMasks:
        nonlocal num_masks
        num_masks += len(queries)
        return start(worker, queries)

    monkeypatch.setattr(MaskWorker, "start", counted)
    tried, steps = answers(llm, **SAMPLINGS[name])
    num_tried = num_masks
    monkeypatch.setattr(llm.parts.engine.masks, "ahead", True)
    masked, same_steps = answers(llm, **SAMPLINGS[name])
    num_masked = num_masks - num_tried
    check_same(tried, masked)
    assert steps == same_steps and num_masked > 0
    assert num_tried == num_masked if name == "filters" else num_tried < 0.6 * num_masked


@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_a_grammar_that_needs_a_stop_token(llm: LLM, min_tokens: int) -> None:
    """Bug: banned before `min_tokens`, it left no choice, and the request failed."""
    [stop_id] = llm.parts.input_processor.tokenizer.encode("yes", add_special_tokens=False)
    sampling = SamplingParams(
        structured_outputs=StructuredOutput.choice(["yes"]),
        stop_token_ids=(stop_id,),
        min_tokens=min_tokens,
        max_tokens=5,
    )
    [output] = llm.generate("x", sampling)
    assert (output.token_ids, output.finish_reason) == ((stop_id,), FinishReason.STOP)
    assert output.text == ("" if min_tokens == 0 else "yes")
