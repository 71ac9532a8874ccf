"""The baseline: transformers' own `generate` with static batching, on plain weights, with SDPA and left padding.

As many prompts as the engine would run at once make a batch, padded to the longest; the batch is done when all of it
is, and the next one waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniserve.benchmarks.arm import Measurement, Progress, Run
from miniserve.benchmarks.offline import WARM_UP_OUTPUT_TOKENS, WARM_UP_TOKENS
from miniserve.config import EngineConfig, ResolvedConfig
from miniserve.errors import ConfigError, ContextLengthError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PAD_TOKEN_ID = 0  # any: the mask hides it


def load(_progress: Progress, config: EngineConfig, max_tokens: int) -> Run:
    """Load the model as the engine would (device, dtype, threads), and warm it up.

    Returns:
        A run over prompts (lists of token ids), which decodes greedily exactly `max_tokens` tokens for each.

    Raises:
        StartupError: the model cannot be had as asked.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; the parent draws the progress
    from miniserve import platform
    from miniserve.config import resolve
    from miniserve.models.checkpoint import open_checkpoint

    if config.load_format != "auto":
        raise ConfigError(f"--load-format {config.load_format}: the baseline needs the weights; leave it out")
    checkpoint = open_checkpoint(config.model, revision=config.revision)
    resolved = resolve(config, platform.detect(), model_max_len=checkpoint.config.max_position_embeddings)
    platform.set_threads(resolved.threads)
    model = _load_model(checkpoint.path, resolved)
    warm_up = [1] * min(WARM_UP_TOKENS, resolved.max_model_len // 2)
    _generate(model, [warm_up], WARM_UP_OUTPUT_TOKENS)

    def run(prompts: Sequence[Any], progress: Progress) -> Measurement:
        _check_lengths(prompts, max_tokens, resolved.max_model_len)
        return _measure(model, prompts, max_tokens, resolved.max_num_seqs, progress)

    return run


def _load_model(path: Path, resolved: ResolvedConfig) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"dtype": getattr(torch, resolved.dtype), "attn_implementation": "sdpa"}
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    model: Any = AutoModelForCausalLM.from_pretrained(path, **options)  # in evaluation mode
    loaded: PreTrainedModel = model.to(resolved.device)
    return loaded


def _check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise ContextLengthError(
            f"the longest prompt has {longest} tokens, and {max_tokens} more do not fit into a context of "
            f"{max_model_len}; lower --max-tokens, or raise --max-model-len"
        )


def _measure(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int, batch_size: int, progress: Progress
) -> Measurement:
    latencies: list[float] = []
    num_padded, total = 0, len(prompts) * max_tokens
    start = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        counter = _TokenCounter(progress, first * max_tokens, total)
        num_padded += _generate(model, batch, max_tokens, counter)
        latencies += [time.perf_counter() - start] * len(batch)
    return Measurement(
        prompts=tuple(map(tuple, prompts)),
        seconds=time.perf_counter() - start,
        first_tokens=(),
        latencies=tuple(latencies),
        completion_tokens=total,
        padded_prompt_tokens=num_padded,
    )


def _generate(
    model: PreTrainedModel, batch: Sequence[Sequence[int]], max_tokens: int, counter: _TokenCounter | None = None
) -> int:
    """Generate exactly `max_tokens` tokens for each prompt; returns the prompt tokens computed, padding included."""
    import torch

    width = max(map(len, batch))
    rows = [[PAD_TOKEN_ID] * (width - len(prompt)) + list(prompt) for prompt in batch]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]
    generate: Any = model.generate
    output = generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        do_sample=False,
        repetition_penalty=1.0,  # whatever the model's generation config recommends
        min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
        pad_token_id=PAD_TOKEN_ID,
        streamer=counter,
    )
    assert tuple(output.shape) == (len(batch), width + max_tokens)
    return len(batch) * width


class _TokenCounter:
    """What `generate` calls a streamer: it is handed the prompts, and then the tokens of each step."""

    def __init__(self, progress: Progress, num_done: int, total: int) -> None:
        self._progress = progress
        self._num_done = num_done
        self._total = total
        self._saw_prompts = False

    def put(self, token_ids: Tensor) -> None:
        """The prompts, then one token for each of them."""
        if self._saw_prompts:
            self._num_done += token_ids.numel()
            self._progress(self._num_done, self._total)
        self._saw_prompts = True

    def end(self) -> None:
        """The batch is done."""
