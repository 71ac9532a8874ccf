"""The engine without its text side: token ids in, token ids out. Needs torch, transformers and safetensors only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from miniserve.config import EngineConfig, resolve
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request
from miniserve.core.scheduler import Scheduler
from miniserve.models.checkpoint import open_checkpoint
from miniserve.outputs import FinishReason
from miniserve.platform import Machine
from miniserve.runner.build import RunnerParts, build_runner
from miniserve.sampling_params import SamplingParams

Tokens = tuple[int, ...]


class TokenEngine:
    """A model with its scheduler and KV cache.

    Args:
        folder: the checkpoint.
        device: cuda or cpu.
        options: fields of `EngineConfig`.
    """

    def __init__(self, folder: Path, device: str, **options: Any) -> None:
        asked = EngineConfig(model=str(folder), device=device, **{"kernels": "torch", **options})
        checkpoint = open_checkpoint(str(folder), weights=asked.load_format != "dummy")
        devices = ("cuda", "cpu") if device == "cuda" else ("cpu",)
        machine = Machine(devices, physical_cores=os.cpu_count() or 1, cpu_has_bf16=False)
        self.resolved = resolve(asked, machine, model_max_len=checkpoint.config.max_position_embeddings)
        self.vocab_size = checkpoint.config.vocab_size
        self.parts: RunnerParts = build_runner(checkpoint, asked, self.resolved, num_token_ids=self.vocab_size)
        kv = KVCacheManager(self.parts.num_kv_blocks, self.parts.block_size)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=self.resolved.max_num_seqs,
            max_num_batched_tokens=self.resolved.max_num_batched_tokens,
            max_model_len=self.resolved.max_model_len,
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Tokens]:
        """Greedy answers of `max_tokens` tokens, all prompts at once."""
        return [tuple(request.token_ids[request.num_prompt_tokens :]) for request in self.run(prompts, max_tokens)[0]]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Request], list[float]]:
        """The finished requests, and the seconds of each step.

        Raises:
            RuntimeError: a request ended in an error.
        """
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [Request(str(index), list(prompt), sampling) for index, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        seconds = []
        while self.scheduler.has_work:
            start = perf_counter()
            step = self.scheduler.schedule()
            output = self.parts.runner.sample(step, self.parts.runner.execute(step))
            self.scheduler.update(step, output)
            seconds.append(perf_counter() - start)
        for request in requests:
            if request.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(f"request {request.request_id} ended with {request.finish_reason}")
        return requests, seconds


def random_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return token_ids
