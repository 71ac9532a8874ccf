"""miniserve's own arms: continuous batching through the offline twin of the server, with or without prefix cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniserve.benchmarks.arm import Measurement, Progress, Run
from miniserve.config import EngineConfig
from miniserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from miniserve.core.request import Request
    from miniserve.engine.llm import LLM

WARM_UP_TOKENS = 256
WARM_UP_OUTPUT_TOKENS = 4


def load(progress: Progress, config: EngineConfig, max_tokens: int) -> Run:
    """Load the engine and warm it up.

    Returns:
        A run over conversations (lists of messages) or prompts (lists of token ids), which decodes greedily exactly
        `max_tokens` tokens for each.

    Raises:
        StartupError: the engine cannot be had as asked.
    """
    from miniserve.engine.build import build_engine
    from miniserve.engine.llm import LLM

    llm = LLM.from_parts(build_engine(config, progress=progress))
    # One token, again and again: no real prompt begins like that, so the prefix cache has nothing from it.
    warm_up = [1] * min(WARM_UP_TOKENS, llm.parts.resolved.max_model_len // 2)
    llm.generate(warm_up, _greedy(WARM_UP_OUTPUT_TOKENS))

    def run(prompts: Sequence[Any], progress: Progress) -> Measurement:
        is_chat = isinstance(prompts[0][0], dict)
        requests = (llm.chat_requests if is_chat else llm.prompt_requests)(prompts, _greedy(max_tokens))
        return _measure(llm, requests, len(requests) * max_tokens, progress)

    return run


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _measure(llm: LLM, requests: Sequence[Request], total: int, progress: Progress) -> Measurement:
    num_done, last = 0, []
    start = time.perf_counter()
    for output in llm.stream(requests):
        num_done += len(output.token_ids)
        progress(num_done, total)
        if output.finish_reason is not None:
            last.append(output)
    seconds = time.perf_counter() - start
    timings = [output.timing for output in last if output.timing is not None]
    return Measurement(
        prompts=tuple(tuple(request.token_ids[: request.num_prompt_tokens]) for request in requests),
        seconds=seconds,
        first_tokens=tuple(timing.first_token for timing in timings if timing.first_token is not None),
        latencies=tuple(timing.total for timing in timings),
        completion_tokens=num_done,
        cached_tokens=sum(output.usage.cached_tokens for output in last),
    )
