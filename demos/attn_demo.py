"""`attn-demo`: attention over a paged cache, drawn small, then the backends compared on the same steps.

Owns the toy steps and their drawing. Metadata, masks and backends are the server's own; the `torch` backend is the
oracle, and this file knows of the others only what `select_backend` says: each fills a cache of its own, in whatever
layout. There is no model: queries, keys and values are random numbers, and one layer stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from time import perf_counter

import torch
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from miniserve import platform
from miniserve.attention.base import AttentionBackend, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata, causal_mask
from miniserve.attention.native import cannot_serve
from miniserve.attention.select import select_backend
from miniserve.config import ATTENTION_BACKENDS, NATIVE_BLOCK_SIZE
from miniserve.core.schedule import ScheduledRequest
from miniserve.kernels.load import load_kernels
from miniserve.kernels.native import NativeKernels
from miniserve.runner.input_builder import build_input
from miniserve.sampling_params import SamplingParams

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # as in Qwen3-0.6B
ORACLE = "torch"
NUM_RUNS = 7
VARIANT = AttentionVariant(scale=HEAD_DIM**-0.5)
MAX_SECONDS = 1.0  # for the runs of one backend on one step: a busy machine gets fewer
MAX_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a step: `num_cached` tokens lie in the cache, `num_new` are computed."""

    name: str
    num_cached: int
    num_new: int


SMALL_STEP = (Part("A decodes", 10, 1), Part("B is a prompt", 0, 5), Part("C is a chunk", 6, 3))
MIXED_STEP = (Part("A decodes", 800, 1), Part("B is a prompt", 0, 96), Part("C is a chunk", 160, 64))
DECODE_STEP = tuple(Part(f"request {index}", 60 + 20 * index, 1) for index in range(16))


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What one layer gets in one step."""

    metadata: AttnMetadata
    query: Tensor  # [num_tokens, num_heads, head_dim]
    key_value: Tensor  # [num_tokens, 2 x num_kv_heads, head_dim]

    def attend(self, backend: AttentionBackend, cache: LayerKVCache) -> Tensor:
        """What the backend says, [num_tokens, num_heads, head_dim]. It writes the same KV to the cache each time."""
        return backend.plan(self.metadata)(self.query, self.key_value, VARIANT, cache)


@dataclass(frozen=True, slots=True)
class ToyStep:
    """The step that is looked at, and one before it, which computed what it finds in the cache."""

    before: LayerInput
    now: LayerInput
    num_blocks: int

    def cache_of(self, backend: AttentionBackend) -> LayerKVCache:
        """A cache of the backend's own, after the step before."""
        shape = backend.cache_shape(self.num_blocks, self.now.metadata.block_size, NUM_KV_HEADS, HEAD_DIM)
        cache = LayerKVCache(torch.zeros(shape, device=self.now.query.device))
        self.before.attend(backend, cache)
        return cache


@dataclass(frozen=True, slots=True)
class Result:
    """How a backend did on a step, or why it did not run."""

    name: str
    difference: float = 0.0  # the largest from the oracle
    seconds: float = 0.0  # median of the runs
    skipped: str | None = None


def run(*, console: Console | None = None, num_runs: int = NUM_RUNS) -> None:
    """Print the demonstration."""
    console = console or Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    device = torch.device(platform.detect().devices[0])
    generator = torch.Generator().manual_seed(0)
    small = make_step(SMALL_STEP, block_size=4, device=device, generator=generator)
    _show_slots(console, SMALL_STEP, small.now.metadata)
    _show_mask(console, SMALL_STEP[-1])
    mixed = make_step(MIXED_STEP, block_size=NATIVE_BLOCK_SIZE, device=device, generator=generator)
    decode = make_step(DECODE_STEP, block_size=NATIVE_BLOCK_SIZE, device=device, generator=generator)
    _show_comparison(console, device, num_runs, {"mixed": mixed, "decode": decode})
    _show_costs(console, {"mixed": mixed.now.metadata, "decode": decode.now.metadata})


# The steps


def make_step(parts: Sequence[Part], *, block_size: int, device: torch.device, generator: torch.Generator) -> ToyStep:
    """Random tensors for the parts, whose blocks lie scattered in the cache, as after hours of serving."""
    num_blocks = [-(-(part.num_cached + part.num_new) // block_size) for part in parts]
    pool_size = sum(num_blocks) + 1  # block 0 is never handed out
    shuffled = iter((torch.randperm(pool_size - 1, generator=generator) + 1).tolist())
    block_ids = [list(islice(shuffled, count)) for count in num_blocks]
    placed = list(zip(parts, block_ids, strict=True))
    before = [_schedule(part.name, 0, part.num_cached, blocks) for part, blocks in placed if part.num_cached]
    now = [_schedule(part.name, part.num_cached, part.num_cached + part.num_new, blocks) for part, blocks in placed]

    def layer_input(scheduled: Sequence[ScheduledRequest]) -> LayerInput:
        metadata = build_input(scheduled, block_size, device).metadata
        heads = torch.randn(len(metadata.slot_mapping), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
        query, key_value = heads.to(device).split_with_sizes((NUM_HEADS, 2 * NUM_KV_HEADS), dim=1)
        return LayerInput(metadata, query, key_value)

    return ToyStep(layer_input(before), layer_input(now), pool_size)


def _schedule(name: str, start: int, end: int, block_ids: list[int]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name,
        token_ids=[0] * end,
        start=start,
        end=end,
        block_ids=block_ids,
        num_prompt_tokens=end,
        sampling=SamplingParams(),
        samples=True,
    )


# Where tokens live


def _show_slots(console: Console, parts: Sequence[Part], metadata: AttnMetadata) -> None:
    _heading(console, "1. Where tokens live")
    table = _table("request", "cached", "new", "block table", "slots of the new tokens")
    starts = pairwise(metadata.query_start_loc.tolist())
    for part, block_ids, (start, end) in zip(parts, metadata.block_tables.tolist(), starts, strict=True):
        slots = metadata.slot_mapping[start:end].tolist()
        row = (part.num_cached, part.num_new, _join(block_ids), _join(slots))
        table.add_row(part.name, *map(str, row))
    console.print(table)
    size = metadata.block_size
    position, slot = parts[0].num_cached, int(metadata.slot_mapping[0])
    block = int(metadata.block_tables[0, position // size])
    _say(
        console,
        f"One step serves all three: their new tokens are packed into one row of {metadata.slot_mapping.shape[0]}. A "
        f"slot is one token's place in the cache: block id x block size + offset. A's new token has position "
        f"{position}: entry {position // size} of its block table is block {block}, the offset is {position % size}, "
        f"so its slot is {block} x {size} + {position % size} = {slot}. Short block tables are padded with block 0, "
        "which belongs to nobody.",
    )


def _show_mask(console: Console, part: Part) -> None:
    _heading(console, "2. Who may look at whom")
    seq_len = part.num_cached + part.num_new
    mask = causal_mask(part.num_new, seq_len, torch.device("cpu"))
    table = _table(part.name, *(str(position) for position in range(seq_len)), padding=0)
    for position, row in enumerate(mask.tolist(), start=part.num_cached):
        table.add_row(f"token {position}", *("[green]x[/]" if visible else "[dim].[/]" for visible in row))
    console.print(table)
    _say(
        console,
        f"The rows are C's new tokens, the columns all of its tokens. A token looks at itself and at what came before "
        f"it, so the last row sees everything: the triangle stands in the bottom right corner. Aligned at the top "
        f"left, token {part.num_cached} would see token 0 alone, and the cached context would be lost. When nothing "
        "is cached the two are the same, which is why chunks and cached prefixes are where this goes wrong.",
    )


# The backends


def compare(step: ToyStep, device: torch.device, kernels: NativeKernels | None, num_runs: int) -> list[Result]:
    """All backends on one step, the oracle first."""
    names = [ORACLE, *(name for name in ATTENTION_BACKENDS if name not in ("auto", ORACLE))]
    no_kernels = "there are no native kernels" if kernels is None else None
    no_native = no_kernels or cannot_serve(step.now.metadata.block_size, HEAD_DIM)
    results: list[Result] = []
    expected: Tensor | None = None
    for name in names:
        choice = select_backend(name, device.type, no_native=no_native)
        if choice.reason is not None:
            results.append(Result(name, skipped=choice.reason))
            continue
        backend = choice.backend(step.now.query.dtype, kernels)
        cache = step.cache_of(backend)
        output = step.now.attend(backend, cache)
        expected = output if expected is None else expected
        difference = (output - expected).abs().max().item()
        results.append(Result(name, difference, _median_seconds(step.now, backend, cache, num_runs)))
    return results


def _median_seconds(layer_input: LayerInput, backend: AttentionBackend, cache: LayerKVCache, num_runs: int) -> float:
    """Of one layer: the plan is made once a step, for all layers."""
    plan = backend.plan(layer_input.metadata)
    seconds: list[float] = []
    while len(seconds) < num_runs and sum(seconds) < MAX_SECONDS:
        start = perf_counter()
        plan(layer_input.query, layer_input.key_value, VARIANT, cache)
        if layer_input.query.device.type != "cpu":
            torch.accelerator.synchronize()  # a call returns before the device is done
        seconds.append(perf_counter() - start)
    return median(seconds)


def _show_comparison(console: Console, device: torch.device, num_runs: int, steps: dict[str, ToyStep]) -> None:
    _heading(console, "3. The backends, side by side")
    kernels = _kernels(console, device)
    table = _table("step", "backend", "largest difference", "one layer", "speed")
    skipped: dict[str, str] = {}
    for name, step in steps.items():
        results = compare(step, device, kernels, num_runs)
        for result in results:
            if result.skipped is not None:
                skipped[result.name] = result.skipped
                continue
            is_oracle = result.name == ORACLE
            difference = "the oracle" if is_oracle else f"{result.difference:.1e}"
            time = f"{result.seconds * 1e3:.2f} ms"
            table.add_row(name, result.name, difference, time, f"{results[0].seconds / result.seconds:.1f} x")
        table.add_section()
    console.print(table)
    for reason in skipped.values():
        console.print(Text(f"Skipped: {reason}.", style="yellow"))
    _say(
        console,
        f"Each backend got the same metadata and tensors (fp32, on {device.type}), and a cache of its own, which it "
        f"filled in a step before; the time is the median of up to {num_runs} runs. The torch backend loops "
        "over the requests and follows the formula word by word: slow, and easy to trust. The others are there for "
        "speed. Their answers differ by rounding alone, since they add the same numbers in another order.",
    )


def _kernels(console: Console, device: torch.device) -> NativeKernels | None:
    """The compiled kernels, where they serve the device; why there are none is printed."""
    if device.type != "cpu":
        return None
    choice = load_kernels("auto", platform.detect().instruction_sets, progress=console.print)
    if choice.reason is not None:
        console.print(Text(choice.reason, style="yellow"))
    return choice.kernels


# What a step costs


@dataclass(frozen=True, slots=True)
class Cost:
    """What attention must do for one step, in one layer, at the least."""

    num_new_tokens: int
    num_bytes: int  # keys and values read, in fp32
    num_operations: int  # multiplications and additions

    @classmethod
    def of(cls, metadata: AttnMetadata) -> Cost:
        """Count: a new token meets every key that it sees, once in q k^T and once in the sum of the values."""
        lens = list(zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True))
        num_pairs = sum(query * (seq - query) + query * (query + 1) // 2 for query, seq in lens)
        num_keys = sum(metadata.seq_lens_host)
        return cls(
            num_new_tokens=sum(metadata.query_lens_host),
            num_bytes=2 * num_keys * NUM_KV_HEADS * HEAD_DIM * torch.float32.itemsize,
            num_operations=4 * num_pairs * NUM_HEADS * HEAD_DIM,
        )


def _show_costs(console: Console, steps: dict[str, AttnMetadata]) -> None:
    _heading(console, "4. Why decode reads everything and computes little")
    table = _table("step", "new tokens", "KV read", "operations", "operations per byte")
    costs = {name: Cost.of(metadata) for name, metadata in steps.items()}
    for name, cost in costs.items():
        table.add_row(
            name,
            str(cost.num_new_tokens),
            f"{cost.num_bytes / 2**20:.1f} MiB",
            f"{cost.num_operations / 1e6:.0f} million",
            f"{cost.num_operations / cost.num_bytes:.1f}",
        )
    console.print(table)
    decode = costs["decode"]
    _say(
        console,
        "The tokens of a prompt share what is read: each key serves every token after it. In a decode step a request "
        "has one new token, which needs all the keys and values before it, and no other request needs those: "
        f"{decode.num_bytes / 2**20:.0f} MiB are read for {decode.num_new_tokens} tokens. A processor could do tens of "
        "operations in the time that a byte takes to arrive, so decode is as fast as memory is. What helps is to read "
        "less: fewer KV heads, smaller numbers. A larger batch does not help here; it shares the model's weights.",
    )


# Drawing


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}[/]", align="left", style="dim"))


def _table(*columns: str, padding: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding), header_style="bold", show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _say(console: Console, text: str) -> None:
    console.print(Text("\n" + text))


def _join(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
