"""The runner: which rows get logits, and what may be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.errors import DeviceFailedError
from miniserve.outputs import TokenLogprobs
from miniserve.runner.model_runner import ModelRunner, StepLogits
from miniserve.sampling_params import SamplingParams
from tests.runner.tiny import tiny_runner

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(1, 11))


def item(start: int, end: int, block_ids: list[int], sampling: SamplingParams = GREEDY) -> ScheduledRequest:
    name = f"in block {block_ids[0]}"
    return ScheduledRequest(name, PROMPT, start, end, block_ids, len(PROMPT), sampling, samples=end == len(PROMPT))


def sample(
    runner: ModelRunner, logits: Tensor, *items: ScheduledRequest, masks: Mapping[str, Any] = MappingProxyType({})
) -> tuple[RunnerResult, ...]:
    """What the runner makes of logits that are no model's."""
    request_ids = tuple(item.request_id for item in items if item.samples)
    return runner.sample(SchedulerOutput(items), StepLogits(request_ids, logits, {}), masks).results


def run(runner: ModelRunner, *items: ScheduledRequest) -> RunnerOutput:
    step = SchedulerOutput(items)
    return runner.sample(step, runner.execute(step))


def token_of(runner: ModelRunner, sampling: SamplingParams) -> int:
    """What the prompt's last token gives, alone."""
    [[token_id]] = [result.token_ids for result in run(runner, item(0, 10, [1, 2, 3], sampling)).results]
    return token_id


def test_a_step_in_which_nobody_samples() -> None:
    runner = tiny_runner()
    step = SchedulerOutput((item(0, 4, [1]), item(0, 6, [2, 3])))
    computed = runner.execute(step)
    assert computed.logits.shape == (0, 40)
    assert runner.sample(step, computed) == RunnerOutput((RunnerResult(), RunnerResult()))


def test_logits_and_tokens_belong_to_the_requests_that_sample() -> None:
    runner = tiny_runner()
    [whole] = run(runner, item(0, 10, [1, 2, 3])).results
    step = SchedulerOutput((item(0, 4, [4]), item(0, 10, [5, 6, 7]), item(0, 2, [8])))
    computed = runner.execute(step)
    assert computed.logits.shape == (1, 40) and computed.logits.dtype == torch.float32
    assert runner.sample(step, computed).results == (RunnerResult(), whole, RunnerResult())


def test_a_part_of_a_step_is_sampled_as_in_the_whole() -> None:
    """Each from its own logits, whoever else there was; with its own prompt logprobs."""
    runner = tiny_runner()
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    drawing = [SamplingParams(seed=number, logprobs=number) for number in range(4)]
    items = [item(0, 10, [number], sampling) for number, sampling in enumerate(drawing)]
    items.insert(2, item(0, 4, [9]))
    whole = sample(runner, logits, *items)
    computed = StepLogits(tuple(each.request_id for each in items if each.samples), logits, {})
    for part in ((0,), (3,), (1, 4), (0, 2, 3), (2,)):
        step = SchedulerOutput(tuple(items[index] for index in part))
        assert runner.sample(step, computed).results == tuple(whole[index] for index in part)
    asking = logprob_item(0, 10, [1, 2, 3], prompt_logprobs=1)
    step = SchedulerOutput((asking, item(0, 10, [4, 5, 6])))
    computed, both = runner.execute(step), run(runner, *step.scheduled).results
    for each, expected in zip(step.scheduled, both, strict=True):
        assert runner.sample(SchedulerOutput((each,)), computed).results == (expected,)


def test_warming_up_leaves_no_trace() -> None:
    runner = tiny_runner()
    [before] = run(runner, item(0, 10, [1, 2, 3])).results
    runner.warm_up()
    assert all(not cache.key_values[0].any() for cache in runner.caches)
    assert run(runner, item(0, 10, [4, 5, 6])).results == (before,)


def test_a_prompt_in_chunks() -> None:
    """The KV of the first chunk is read by the second: same logits as at once."""
    runner = tiny_runner()
    whole = runner.execute(SchedulerOutput((item(0, 10, [1, 2, 3]),)))
    runner.execute(SchedulerOutput((item(0, 7, [9, 4]),)))
    chunked = runner.execute(SchedulerOutput((item(7, 10, [9, 4, 6]),)))
    torch.testing.assert_close(chunked.logits, whole.logits, atol=1e-5, rtol=1e-5)


def test_padded_vocabulary_is_never_sampled() -> None:
    """A model's vocabulary is rounded up beyond the tokenizer's; the logits there mean nothing and may be large."""
    runner = tiny_runner(num_token_ids=30)
    head = runner.model.head
    assert head is not None and head.weight is not None
    head.weight[30:] = head.weight[:10] * 1000
    step = SchedulerOutput((item(0, 10, [1, 2, 3]),))
    assert runner.execute(step).logits.shape == (1, 30)
    sampled = [token_of(runner, SamplingParams(seed=seed)) for seed in range(50)]
    assert max(*sampled, token_of(runner, GREEDY)) < 30
    runner.num_token_ids = 40  # guard: it is the bound that keeps them out
    assert token_of(runner, GREEDY) >= 30


def test_seeded_noise_counts_output_positions() -> None:
    """The first output token of a short and of a long prompt have the same position: 0."""
    runner = tiny_runner()
    logits = torch.zeros(1, 40)

    def draw(num_prompt_tokens: int, end: int) -> tuple[RunnerResult, ...]:
        sampling = SamplingParams(seed=1)
        request = ScheduledRequest("r", PROMPT, 0, end, [], num_prompt_tokens, sampling, samples=True)
        return sample(runner, logits, request)

    assert draw(3, 3) == draw(8, 8)
    assert [draw(3, 3 + n) for n in range(5)] == [draw(5, 5 + n) for n in range(5)]
    assert len({draw(3, 3 + n) for n in range(5)}) > 1


# Logprobs


def logprob_item(start: int, end: int, block_ids: list[int], **sampling: Any) -> ScheduledRequest:
    params = SamplingParams(temperature=0, **sampling)
    wants = params.prompt_logprobs is not None
    return replace(item(start, end, block_ids, params), wants_prompt_logprobs=wants)


def true_logprobs(runner: ModelRunner) -> Tensor:
    """fp64 [10, 40]: of what follows each token of the prompt."""
    rows = []
    for end in range(1, 11):
        prefix = ScheduledRequest("r", PROMPT[:end], 0, end, [1, 2, 3], end, GREEDY, samples=True)
        rows.append(runner.execute(SchedulerOutput((prefix,))).logits[0])
    return torch.stack(rows).double().log_softmax(-1)


def check_entry(entry: TokenLogprobs, token_id: int, expected: Tensor, num_top: int) -> None:
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
    top = expected.topk(num_top)
    assert [top_id for top_id, _ in entry.top] == top.indices.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_of_the_sampled_token(num_top: int) -> None:
    """Bug: logprobs 0 gave nothing; it asks for the sampled token's."""
    runner = tiny_runner()
    expected = true_logprobs(runner)[-1]
    [result] = run(runner, logprob_item(0, 10, [1, 2, 3], logprobs=num_top)).results
    [token_id], [entry] = result.token_ids, result.logprobs
    check_entry(entry, token_id, expected, num_top)
    assert token_id == int(expected.argmax())


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    runner = tiny_runner()
    asked: list[dict[str, int]] = [{"logprobs": 2}, {}, {"logprobs": 0}, {"logprobs": 7}]
    items = [logprob_item(0, 10, [1 + 3 * i, 2 + 3 * i, 3 + 3 * i], **params) for i, params in enumerate(asked)]
    results = run(runner, *items).results
    assert [[len(entry.top) for entry in result.logprobs] for result in results] == [[2], [], [0], [7]]
    assert len({result.token_ids for result in results}) == 1


@pytest.mark.parametrize(
    "chunks", [[(0, 10)], [(0, 3), (3, 4), (4, 10)], [(0, 9), (9, 10)]], ids=["whole", "three", "last-token"]
)
def test_prompt_logprobs(chunks: Sequence[tuple[int, int]]) -> None:
    """Each prompt token but the first, once, however the prompt is cut; beside a request that wants none."""
    runner = tiny_runner()
    expected = true_logprobs(runner)
    entries: list[TokenLogprobs] = []
    for start, end in chunks:
        wanting = logprob_item(start, end, [4, 5, 6], prompt_logprobs=3)
        # A row of one new token is packed first: rows and requests are in different orders then.
        decode = item(9, 10, [7, 8, 9])
        other, result = run(runner, decode, wanting).results
        assert other.prompt_logprobs == ()
        assert len(result.token_ids) == (end == 10)
        assert len(result.prompt_logprobs) == min(end, 9) - start
        entries += result.prompt_logprobs
    for position, entry in enumerate(entries, start=1):
        check_entry(entry, PROMPT[position], expected[position - 1], 3)
    assert len(entries) == 9


def test_prompt_logprobs_end_with_the_prompt() -> None:
    """What follows the prompt's last token is output, also where it is known already."""
    runner = tiny_runner()
    step = (replace(logprob_item(0, 10, [1, 2, 3], prompt_logprobs=0), num_prompt_tokens=6),)
    [result] = run(runner, *step).results
    assert [entry.token_id for entry in result.prompt_logprobs] == PROMPT[1:6]


def test_prompt_logprobs_of_several_requests_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a long prompt would not fit into memory at once; slices cross the borders of requests."""
    runner = tiny_runner()
    items = [
        logprob_item(0, 10, [1, 2, 3], prompt_logprobs=1),
        item(0, 10, [4, 5, 6]),
        logprob_item(0, 10, [7, 8, 9], prompt_logprobs=0, logprobs=2),
        replace(logprob_item(0, 1, [10], prompt_logprobs=5), token_ids=[3], num_prompt_tokens=1, samples=True),
    ]
    whole = run(runner, *items).results
    monkeypatch.setattr("miniserve.runner.model_runner._PROMPT_ROWS_PER_SLICE", 4)
    sliced = run(runner, *items).results
    assert [len(result.prompt_logprobs) for result in sliced] == [9, 0, 9, 0]
    for one, other in zip(whole, sliced, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5) and len(a.top) == len(b.top)


def test_the_padded_vocabulary_takes_no_probability() -> None:
    runner = tiny_runner(num_token_ids=30)
    [result] = run(runner, logprob_item(0, 10, [1, 2, 3], logprobs=20, prompt_logprobs=20)).results
    for entry in (*result.logprobs, *result.prompt_logprobs):
        assert all(token_id < 30 for token_id, _ in entry.top)
    runner = tiny_runner(num_token_ids=15)
    [result] = run(runner, logprob_item(0, 10, [1, 2, 3], logprobs=20)).results
    probabilities = torch.tensor([logprob for _, logprob in result.logprobs[0].top]).exp()
    assert len(probabilities) == 15 and float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)


# What a request changes, and what is broken


def sample_row(item: ScheduledRequest, logits: Tensor) -> RunnerResult:
    runner = tiny_runner()
    [result] = sample(runner, logits, item)
    return result


def test_logprobs_are_those_before_penalties_and_bans() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 5], logits[0, 6] = 3.0, 2.0
    before = logits.clone()
    sampling = SamplingParams(temperature=0.1, top_k=2, logit_bias={6: -100.0}, logprobs=2, frequency_penalty=1.0)
    banned = replace(item(0, 10, [1, 2, 3], sampling), banned_ids=frozenset({5}))
    result = sample_row(banned, logits)
    assert torch.equal(logits, before)
    [token_id], [entry] = result.token_ids, result.logprobs
    assert token_id not in (5, 6)
    check_entry(entry, token_id, logits[0].double().log_softmax(-1), 2)


def test_masks_belong_to_requests_by_their_ids() -> None:
    runner = tiny_runner()
    names = ("a", "b", "c", "d")
    items = [
        replace(item(0, 10, [1, 2, 3], SamplingParams(temperature=0, logprobs=0)), request_id=name) for name in names
    ]
    items[1] = replace(items[1], samples=False)
    logits = torch.arange(40.0).expand(3, -1)
    masks = {
        "a": np.array([0, 0b1], np.int32),
        "c": np.array([0b10100, 0], np.int32),
        "gone": np.array([1, 0], np.int32),
    }
    results = sample(runner, logits, *items, masks=masks)
    assert [result.token_ids for result in results] == [(32,), (), (4,), (39,)]
    raw = logits[0].double().log_softmax(-1)
    for result in (results[0], results[2], results[3]):
        check_entry(result.logprobs[0], result.token_ids[0], raw, 0)


def test_a_mask_that_leaves_nothing_is_an_error() -> None:
    runner = tiny_runner()
    request = item(0, 10, [1, 2, 3])
    masks = {request.request_id: np.zeros(2, np.int32)}
    [result] = sample(runner, torch.zeros(1, 40), request, masks=masks)
    assert result.error is not None and "grammar allows nothing" in result.error and result.token_ids == ()


def test_penalties_see_the_split_between_prompt_and_output() -> None:
    """Bug: after a preemption, output tokens passed for prompt, and were no longer penalised."""
    logits = torch.zeros(1, 40)
    logits[0, 7], logits[0, 8] = 2.0, 1.9
    sampling = SamplingParams(temperature=0, presence_penalty=1.0)
    for start in (0, 4):  # the whole sequence computed again, or only its last token
        of_prompt = ScheduledRequest("r", [7, 1, 2, 3, 4], start, 5, [1, 2], 5, sampling, samples=True)
        of_output = ScheduledRequest("r", [1, 7, 2, 3, 4], start, 5, [1, 2], 1, sampling, samples=True)
        assert sample_row(of_prompt, logits).token_ids == (7,)
        assert sample_row(of_output, logits).token_ids == (8,)


@pytest.mark.parametrize(
    "broken", [[nan] * 40, [0.0] * 39 + [nan], [0.0] * 20 + [inf] + [0.0] * 19, [-inf] * 40], ids=str
)
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=1, top_p=0.9, logprobs=3),
        SamplingParams(temperature=0, logit_bias={39: -100}, repetition_penalty=2.0),
    ],
)
def test_a_broken_row_fails_alone(broken: list[float], sampling: SamplingParams) -> None:
    """Bug: NaN in the logits of one request raised in the sampler, and killed everybody's."""
    runner = tiny_runner()
    good = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    neighbour = SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=2)
    first, last = item(0, 10, [1, 2, 3], neighbour), item(0, 10, [4, 5, 6])
    alone = sample(runner, good, first, last)
    logits = torch.stack((good[0], torch.tensor(broken), good[1]))
    a, failed, b = sample(runner, logits, first, item(0, 10, [7, 8, 9], sampling), last)
    assert (a, b) == alone
    assert failed == RunnerResult(error="the model's logits are not finite")


def test_a_logit_of_minus_infinity_is_no_fault() -> None:
    logits = torch.full((1, 40), -inf)
    logits[0, 3] = 1.0
    result = sample_row(item(0, 10, [1, 2, 3], SamplingParams(seed=0, logprobs=2)), logits)
    assert result.token_ids == (3,)
    [entry] = result.logprobs
    assert entry.logprob == 0.0 and entry.top[1][1] == -inf


def test_broken_prompt_rows_fail_alone() -> None:
    """A prompt whose KV is NaN gives NaN logprobs, also in a step in which nothing is sampled."""
    runner = tiny_runner()
    healthy = logprob_item(0, 10, [4, 5, 6], prompt_logprobs=1)
    [alone] = run(runner, healthy).results
    for cache in runner.caches:
        cache.key_values[1] = nan
    results = run(runner, logprob_item(4, 8, [1, 2], prompt_logprobs=1), healthy).results
    assert results[0].error is not None and results[0].prompt_logprobs == ()
    assert results[1].error is None and results[1].token_ids == alone.token_ids
    assert len(results[1].prompt_logprobs) == 9


def test_what_is_left_in_a_block_of_a_failed_request_reaches_nobody() -> None:
    """NaN in slots that are masked reached the answers all the same: 0 x NaN is NaN."""
    runner = tiny_runner()
    short = ScheduledRequest("short", PROMPT[:9], 8, 9, [4, 5, 6], 9, GREEDY, samples=True)
    before = replace(short, start=0, end=8, samples=False)
    long = item(9, 10, [1, 2, 3])
    run(runner, before, item(0, 9, [1, 2, 3]))
    expected = run(runner, long, short).results
    for cache in runner.caches:
        cache.key_values[6] = nan
    step = SchedulerOutput((long, short))
    assert runner.sample(step, runner.execute(step)).results[1].error is not None  # guard: it would
    cleared = replace(step, blocks_to_clear=(6,))
    assert runner.sample(cleared, runner.execute(cleared)).results == expected


def test_rows_that_ask_for_nothing_are_never_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain requests must not pay for what others use: no pass over their tokens, no change of their logits."""
    seen: list[int] = []

    def process(logits: Tensor, rows: Sequence[object], _operators: object) -> Tensor:
        seen.append(len(rows))
        return logits

    monkeypatch.setattr("miniserve.runner.sampler.process_logits", process)
    runner = tiny_runner()
    plain = [item(0, 10, [1, 2, 3]), item(0, 10, [4, 5, 6], SamplingParams(seed=1, top_p=0.5, logprobs=1))]
    run(runner, *plain)
    assert seen == []
    run(runner, *plain, item(0, 10, [7, 8, 9], SamplingParams(logit_bias={1: 1.0})))
    assert seen == [1]


def test_an_operator_that_fails_and_a_device_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors an accelerator answers nothing any more: then no request can be served, and none is to wait."""
    runner = tiny_runner()
    step = SchedulerOutput((item(0, 3, [1, 2, 3]),))

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(runner, "_compute", fail)
    with pytest.raises(torch.AcceleratorError):
        runner.execute(step)
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(DeviceFailedError, match="cpu has failed: illegal memory access"):
        runner.execute(step)
