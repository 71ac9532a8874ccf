"""The model runner: computes what the scheduler chose, and samples. Keeps nothing per request between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miniserve.attention.base import AttentionBackend, LayerKVCache
from miniserve.core.schedule import RunnerOutput, ScheduledRequest, SchedulerOutput
from miniserve.models.transformer import Transformer
from miniserve.runner.input_builder import build_input
from miniserve.runner.sampler import Sampler, SampleRow


class ModelRunner:
    """Runs one model on one device.

    `num_token_ids` is how many ids the tokenizer knows: a model's vocabulary may be padded beyond it, and a padded id
    is never sampled.
    """

    def __init__(
        self,
        model: Transformer,
        caches: Sequence[LayerKVCache],
        backend: AttentionBackend,
        *,
        block_size: int,
        num_token_ids: int,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.backend = backend
        self.block_size = block_size
        self.num_token_ids = num_token_ids
        self.device = device
        self.sampler = Sampler(device, seed)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> Tensor:
        """Compute the step's tokens and store their KV.

        Returns:
            fp32 [num_samples, num_token_ids], the logits of the requests that sample, in the step's order.
        """
        inputs = build_input(step.scheduled, self.block_size, self.device)
        plan = self.backend.plan(inputs.metadata)
        hidden: Tensor = self.model(inputs.token_ids, inputs.positions, plan, self.caches)
        if len(inputs.sample_rows) == 0:  # only parts of prompts in this step
            return hidden.new_empty(0, self.num_token_ids)
        logits = self.model.logits(hidden[inputs.sample_rows])
        return logits[:, : self.num_token_ids]

    @torch.inference_mode()
    def sample(self, step: SchedulerOutput, logits: Tensor) -> RunnerOutput:
        """Choose the next token of each request that samples, from `execute`'s logits."""
        rows = [_sample_row(item) for item in step.scheduled if item.samples]
        token_ids = iter(self.sampler.sample(logits, rows) if rows else ())
        return RunnerOutput(tuple((next(token_ids),) if item.samples else () for item in step.scheduled))


def _sample_row(item: ScheduledRequest) -> SampleRow:
    return SampleRow(item.sampling, position=item.end - item.num_prompt_tokens)
