"""The step that takes the most memory: as many requests and tokens as a step may have, all of which sample."""

from __future__ import annotations

from itertools import count, islice

from miniserve.core.schedule import ScheduledRequest, SchedulerOutput
from miniserve.sampling_params import SamplingParams

# What takes the most: a filter over the whole vocabulary.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=1)


def largest_step(*, num_requests: int, num_tokens: int, max_model_len: int, block_size: int) -> SchedulerOutput:
    """Prompts of nearly equal length, in blocks from 1 on."""
    num_requests = min(num_requests, num_tokens)
    blocks = count(1)
    items = []
    for index in range(num_requests):
        length = min(num_tokens * (index + 1) // num_requests - num_tokens * index // num_requests, max_model_len)
        block_ids = tuple(islice(blocks, -(-length // block_size)))
        items.append(
            ScheduledRequest(
                f"largest-{index}",
                (0,) * length,
                0,
                length,
                block_ids,
                num_prompt_tokens=length,
                sampling=_SAMPLING,
                samples=True,
            )
        )
    return SchedulerOutput(tuple(items))
