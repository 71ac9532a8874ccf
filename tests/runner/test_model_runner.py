"""The runner: which rows get logits, and what may be sampled."""

from __future__ import annotations

import torch

from miniserve.core.schedule import RunnerOutput, ScheduledRequest, SchedulerOutput
from miniserve.runner.model_runner import ModelRunner
from miniserve.sampling_params import SamplingParams
from tests.runner.tiny import tiny_runner

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(1, 11))


def item(start: int, end: int, block_ids: list[int], sampling: SamplingParams = GREEDY) -> ScheduledRequest:
    return ScheduledRequest("r", PROMPT, start, end, block_ids, len(PROMPT), sampling, samples=end == len(PROMPT))


def run(runner: ModelRunner, *items: ScheduledRequest) -> RunnerOutput:
    step = SchedulerOutput(items)
    return runner.sample(step, runner.execute(step))


def test_a_step_in_which_nobody_samples() -> None:
    runner = tiny_runner()
    step = SchedulerOutput((item(0, 4, [1]), item(0, 6, [2, 3])))
    logits = runner.execute(step)
    assert logits.shape == (0, 40)
    assert runner.sample(step, logits) == RunnerOutput(((), ()))


def test_logits_and_tokens_belong_to_the_requests_that_sample() -> None:
    runner = tiny_runner()
    [whole] = run(runner, item(0, 10, [1, 2, 3])).token_ids
    step = SchedulerOutput((item(0, 4, [4]), item(0, 10, [5, 6, 7]), item(0, 2, [8])))
    logits = runner.execute(step)
    assert logits.shape == (1, 40) and logits.dtype == torch.float32
    assert runner.sample(step, logits).token_ids == ((), whole, ())


def test_a_prompt_in_chunks() -> None:
    """The KV of the first chunk is read by the second: same logits as at once."""
    runner = tiny_runner()
    whole = runner.execute(SchedulerOutput((item(0, 10, [1, 2, 3]),)))
    runner.execute(SchedulerOutput((item(0, 7, [9, 4]),)))
    chunked = runner.execute(SchedulerOutput((item(7, 10, [9, 4, 6]),)))
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_padded_vocabulary_is_never_sampled() -> None:
    """A model's vocabulary is rounded up beyond the tokenizer's; the logits there mean nothing and may be large."""
    runner = tiny_runner(num_token_ids=30)
    head = runner.model.head
    assert head is not None and head.weight is not None
    head.weight[30:] = head.weight[:10] * 1000
    step = SchedulerOutput((item(0, 10, [1, 2, 3]),))
    assert runner.execute(step).shape == (1, 30)
    sampled = [run(runner, item(0, 10, [1, 2, 3], SamplingParams(seed=seed))).token_ids for seed in range(50)]
    sampled.append(run(runner, item(0, 10, [1, 2, 3])).token_ids)
    assert all(token_id < 30 for ((token_id,),) in sampled)
    runner.num_token_ids = 40  # guard: it is the bound that keeps them out
    assert run(runner, item(0, 10, [1, 2, 3])).token_ids[0][0] >= 30


def test_seeded_noise_counts_output_positions() -> None:
    """The first output token of a short and of a long prompt have the same position: 0."""
    runner = tiny_runner()
    logits = torch.zeros(1, 40)

    def sample(num_prompt_tokens: int, end: int) -> RunnerOutput:
        sampling = SamplingParams(seed=1)
        request = ScheduledRequest("r", PROMPT, 0, end, [], num_prompt_tokens, sampling, samples=True)
        return runner.sample(SchedulerOutput((request,)), logits)

    assert sample(3, 3) == sample(8, 8)
    assert [sample(3, 3 + n) for n in range(5)] == [sample(5, 5 + n) for n in range(5)]
    assert len({sample(3, 3 + n) for n in range(5)}) > 1
