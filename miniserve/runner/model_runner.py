"""The model runner: computes what the scheduler chose, and samples. Keeps nothing per request between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniserve.attention.base import AttentionBackend, LayerKVCache
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.errors import DeviceFailedError
from miniserve.kernels import sampling
from miniserve.kernels.sampling import SamplingOperators
from miniserve.models.transformer import Transformer
from miniserve.outputs import TokenLogprobs
from miniserve.runner.cuda_graphs import GraphedSteps, GraphRoom, Graphs
from miniserve.runner.input_builder import ModelInput, build_input
from miniserve.runner.logits_processors import SampleRow
from miniserve.runner.logprobs import LogprobQuery, pack_logprobs, unpack_logprobs
from miniserve.runner.recorded_steps import RecordedSteps
from miniserve.runner.sampler import Sampler
from miniserve.sampling_params import SamplingParams

# The logits of a whole prompt would take more memory than the rest of a step: they are computed in slices of this many
# rows, of which only the logprobs stay.
_PROMPT_ROWS_PER_SLICE = 128
_NOT_FINITE = "the model's logits are not finite"
_NOTHING_ALLOWED = f"{_NOT_FINITE}, or the grammar allows nothing that the request does"
_NO_MASKS: Mapping[str, NDArray[np.int32]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What `execute` hands to `sample`.

    Attributes:
        request_ids: of the requests that sample, in the step's order.
        logits: fp32 [num_samples, num_token_ids], theirs.
        prompt_logprobs: by request, for those that want them; an entry is None where the logits were not finite.
    """

    request_ids: tuple[str, ...]
    logits: Tensor
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs | None, ...]]

    def of(self, items: Sequence[ScheduledRequest]) -> Tensor:
        """fp32 [len(items), num_token_ids]: the logits of these, some or all of those that sample."""
        if len(items) == len(self.request_ids):
            return self.logits
        rows = {request_id: row for row, request_id in enumerate(self.request_ids)}
        return self.logits[[rows[item.request_id] for item in items]]


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
        self.operators: SamplingOperators = sampling if backend.kernels is None else backend.kernels
        self.sampler = Sampler(device, seed, self.operators)
        kernels = backend.kernels
        self._compute: Callable[[ModelInput], Tensor] = (
            self._forward if kernels is None else RecordedSteps(self._forward, kernels)
        )

    def compute_plainly(self) -> None:
        """From now on, without recordings, as where nothing can be recorded. For comparisons."""
        self._compute = self._forward

    def cannot_capture(self) -> str | None:
        """Why a CUDA graph cannot hold a decode step, or None."""
        if not self.backend.can_capture:
            return f"they need flash_attn, and the attention is {self.backend.name}"
        if self.model.config.experts is not None:
            return "which experts a token passes through decides what a step computes"
        return None

    @torch.inference_mode()
    def capture(self, graphs: Graphs, room: GraphRoom, *, on_capture: Callable[[int, int], None]) -> Sequence[int]:
        """Capture decode steps, which are replayed from now on; their sizes. `on_capture` is told (done, total)."""
        steps = GraphedSteps(self._forward, graphs, room, device=self.device, on_capture=on_capture)
        self._clear((0,))  # what the captured steps wrote to
        self._compute = steps
        return steps.sizes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a step of one token that nobody asked for, so that a request does not wait for what only comes once.

        It writes to block 0, which no request owns, and leaves it as it was.
        """
        sampling = SamplingParams(temperature=0, max_tokens=1)
        item = ScheduledRequest("warm-up", (0,), 0, 1, (0,), num_prompt_tokens=1, sampling=sampling, samples=True)
        step = SchedulerOutput((item,))
        self.sample(step, self.execute(step))
        self._clear((0,))

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepLogits:
        """Compute the step's tokens and store their KV; the logits of the requests that sample, and prompt logprobs."""
        with self._watching_device():
            self._clear(step.blocks_to_clear)
            inputs = build_input(step.scheduled, self.block_size, self.device)
            hidden = self._compute(inputs)
            request_ids = tuple(item.request_id for item in step.scheduled if item.samples)
            logits = self._logits(hidden[inputs.sample_rows])
            return StepLogits(request_ids, logits, self._prompt_logprobs(step, inputs, hidden))

    @torch.inference_mode()
    def sample(
        self, step: SchedulerOutput, computed: StepLogits, masks: Mapping[str, NDArray[np.int32]] = _NO_MASKS
    ) -> RunnerOutput:
        """Choose the next token of each request that samples, from what `execute` gave.

        A request whose logits are not finite, or whose mask allows nothing, gets an error; the others are served as if
        it were not there.

        Args:
            step: the one that was executed, or a part of it, in its order.
            computed: what `execute` gave for the whole.
            masks: by request id, what its grammar allows, as in `SampleRow`; who is not there is free.
        """
        items = [item for item in step.scheduled if item.samples]
        rows = [_sample_row(item, masks.get(item.request_id)) for item in items]
        with self._watching_device():
            logits = computed.of(items)
            token_ids = self.sampler.sample(logits, rows) if rows else []
            logprobs = self._logprobs(items, logits, token_ids)
        sampled = iter([_sampled(token_id, logprobs.get(i), rows[i]) for i, token_id in enumerate(token_ids)])
        results = [next(sampled) if item.samples else RunnerResult() for item in step.scheduled]
        if computed.prompt_logprobs:
            pairs = zip(step.scheduled, results, strict=True)
            entries = computed.prompt_logprobs
            results = [_with_prompt_logprobs(result, entries.get(item.request_id, ())) for item, result in pairs]
        return RunnerOutput(tuple(results))

    @contextmanager
    def _watching_device(self) -> Iterator[None]:
        """Tell an operator that failed from an accelerator that did: after some of its errors every other call fails.

        Raises:
            DeviceFailedError: it cannot even make a number any more.
        """
        try:
            yield
        except torch.AcceleratorError as error:
            try:
                torch.ones(1, device=self.device).item()
            except torch.AcceleratorError:
                raise DeviceFailedError(f"{self.device} has failed: {error}") from error
            raise

    def _forward(self, inputs: ModelInput) -> Tensor:
        """fp32 [num_tokens, hidden_size]."""
        plan = self.backend.plan(inputs.metadata)
        hidden: Tensor = self.model(inputs.token_ids, inputs.positions, plan, self.caches)
        return hidden

    def _clear(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            index = torch.tensor(block_ids, device=self.device)
            for cache in self.caches:
                cache.key_values.index_fill_(0, index, 0)

    def _logits(self, hidden: Tensor) -> Tensor:
        """fp32 [num_rows, num_token_ids] of fp32 [num_rows, hidden_size]."""
        if len(hidden) == 0:  # only parts of prompts in this step
            return hidden.new_empty(0, self.num_token_ids)
        return self.model.logits(hidden)[:, : self.num_token_ids]

    def _logprobs(
        self, items: Sequence[ScheduledRequest], logits: Tensor, token_ids: Sequence[int | None]
    ) -> dict[int, TokenLogprobs | None]:
        """By row of `logits`, the sampled token's logprobs where they are asked for; raw, so before penalties."""
        queries = [
            LogprobQuery(row, token_id, item.sampling.logprobs)
            for row, (item, token_id) in enumerate(zip(items, token_ids, strict=True))
            if item.sampling.logprobs is not None and token_id is not None
        ]
        if not queries:
            return {}
        of_queries = logits if len(queries) == len(logits) else logits[self._rows(queries)]
        packed = pack_logprobs(of_queries, queries, max(query.num_top for query in queries), self.operators)
        return {query.row: entry for query, entry in zip(queries, unpack_logprobs(packed, queries), strict=True)}

    def _prompt_logprobs(
        self, step: SchedulerOutput, inputs: ModelInput, hidden: Tensor
    ) -> dict[str, tuple[TokenLogprobs | None, ...]]:
        """By request, the logprobs of the prompt tokens that follow those it computes."""
        wanted = {
            item.request_id: _prompt_queries(item, inputs.first_rows[index])
            for index, item in enumerate(step.scheduled)
            if item.wants_prompt_logprobs
        }
        queries = [query for of_request in wanted.values() for query in of_request]
        if not queries:
            return {}
        num_top = max(query.num_top for query in queries)
        packed = []
        for start in range(0, len(queries), _PROMPT_ROWS_PER_SLICE):
            part = queries[start : start + _PROMPT_ROWS_PER_SLICE]
            packed.append(pack_logprobs(self._logits(hidden[self._rows(part)]), part, num_top, self.operators))
        entries = iter(unpack_logprobs(torch.cat(packed), queries))
        return {request_id: tuple(islice(entries, len(of_request))) for request_id, of_request in wanted.items()}

    def _rows(self, queries: Sequence[LogprobQuery]) -> Tensor:
        return torch.tensor([query.row for query in queries], device=self.device)


def _sample_row(item: ScheduledRequest, mask: NDArray[np.int32] | None) -> SampleRow:
    start = item.num_prompt_tokens
    position = item.end - start
    if not item.sampling.has_penalties:
        return SampleRow(item.sampling, position, item.banned_ids, mask=mask)
    prompt_ids, output_ids = item.token_ids[:start], item.token_ids[start : item.end]
    return SampleRow(item.sampling, position, item.banned_ids, prompt_ids, output_ids, mask)


def _prompt_queries(item: ScheduledRequest, first_row: int) -> list[LogprobQuery]:
    """Each row tells of the token that follows. What follows the prompt is output, and not asked for here."""
    num_top = item.sampling.prompt_logprobs
    assert num_top is not None, "the scheduler reads the same parameter"
    following = item.token_ids[item.start + 1 : min(item.end + 1, item.num_prompt_tokens)]
    return [LogprobQuery(row, token_id, num_top) for row, token_id in enumerate(following, start=first_row)]


def _sampled(token_id: int | None, logprobs: TokenLogprobs | None, row: SampleRow) -> RunnerResult:
    if token_id is None:
        return RunnerResult(error=_NOT_FINITE if row.mask is None else _NOTHING_ALLOWED)
    return RunnerResult((token_id,), () if logprobs is None else (logprobs,))


def _with_prompt_logprobs(result: RunnerResult, entries: Sequence[TokenLogprobs | None]) -> RunnerResult:
    if not entries:
        return result
    known = tuple(entry for entry in entries if entry is not None)
    if result.error is not None or len(known) < len(entries):
        return RunnerResult(error=_NOT_FINITE)
    return replace(result, prompt_logprobs=known)
