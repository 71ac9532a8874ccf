"""Paged attention against its twin; and that a token's result is its own, however the tokens are cut into steps."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve.kernels.native import NativeKernels
from tests.kernels.paged import (
    CONTEXT,
    LENGTHS,
    Pool,
    Span,
    assert_close,
    check,
    in_chunks,
    make_requests,
    whole,
)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 8), (6, 2, 64), (3, 1, 80), (16, 1, 128), (17, 1, 32), (2, 2, 256), (2, 1, 512), (8, 2, 33)],
)
@pytest.mark.parametrize("block_size", [32, 64])
def test_heads(
    kernels: NativeKernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    rotary_dim = head_dim // 2 * 2
    check(kernels, make_requests(LENGTHS, dtype=dtype, block_size=block_size, rotary_dim=rotary_dim, **shape))


@pytest.mark.parametrize(
    "options",
    [
        {"rotary_dim": 0},
        {"rotary_dim": 24},
        {"rotary_dim": 2},
        {"qk_norm": True},
        {"qk_norm": True, "rotary_dim": 0},
        {"soft_cap": 2.0},
        {"soft_cap": 0.1, "qk_norm": True, "window": 20},
        {"block_size": 96},
        {"sinks": True},
        {"sinks": True, "window": 20, "soft_cap": 2.0, "qk_norm": True},
        {"qk_norm": True, "rotary_dim": 48},
        {"head_dim": 128, "rotary_dim": 96},
        {"head_dim": 128, "rotary_dim": 96, "qk_norm": True, "sinks": True, "window": 33},
    ],
    ids=str,
)
def test_transforms_and_scores(kernels: NativeKernels, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(kernels, make_requests(LENGTHS, dtype=dtype, **options))


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 69, 70, 71, 255, 256, 257, 299, 300, 301, 1000])
def test_windows(kernels: NativeKernels, dtype: torch.dtype, window: int) -> None:
    """Lengths of 33, 70 and 300 are below, at, above and far beyond it."""
    check(kernels, make_requests(LENGTHS, dtype=dtype, window=window))


def test_a_window_changes_what_is_beyond_it_only(kernels: NativeKernels, dtype: torch.dtype) -> None:
    requests = make_requests([300], dtype=dtype)
    [plain], [cut] = (Pool(kernels, r).attend((0, 0, 300)) for r in (requests, replace(requests, window=40)))
    assert torch.equal(cut[:40], plain[:40])
    assert (cut[40:] != plain[40:]).any(dim=-1).all()


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("start", "window"), [(699, 128), (699, 1), (699, 32), (600, 128), (520, 300), (480, 100)])
def test_what_lies_before_a_window_is_not_read(
    kernels: NativeKernels, dtype: torch.dtype, start: int, window: int, int8: bool
) -> None:
    """Decodes, and chunks of prompts: chunks of the cache that nobody sees cost nothing, and may hold anything.

    They used to be read where they share a span of 256 keys with the window.
    """
    requests = make_requests([700, 690], dtype=dtype, window=window, int8=int8, block_size=64)
    pool = Pool(kernels, requests)
    pool.attend((0, 0, start), (1, 0, 690))
    expected = pool.attend((0, start, 700))[0]
    pool.break_before(0, start + 1 - window)
    assert torch.equal(pool.attend((0, start, 700), (1, 689, 690))[0], expected)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_sinks_far_from_the_scores(kernels: NativeKernels, dtype: torch.dtype, score: float) -> None:
    """One that is far below takes nothing; one that is far above takes everything."""
    requests = make_requests([300], dtype=dtype)
    [plain] = Pool(kernels, requests).attend((0, 0, 300))
    [output] = Pool(kernels, replace(requests, sinks=torch.full((4,), score))).attend((0, 0, 300))
    assert torch.equal(output, plain if score < 0 else torch.zeros_like(plain))


def test_large_scores(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """The softmax neither overflows nor forgets the largest key when it comes late, or in another span."""
    requests = make_requests([300], dtype=dtype, rotary_dim=0)
    [heads] = requests.heads
    heads[:, :4] *= 30
    heads[290, 4:6] *= 10
    heads[10, 4:6] *= 10
    [output] = Pool(kernels, requests).attend((0, 0, 300))
    # Scores of some hundreds are themselves rounded to about 1e-5, which is then a relative error.
    assert_close(output, requests.expected(0), fp32_tolerance=5e-4)


def test_queries_and_keys_are_transformed_in_place(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """What the operator's schema says it writes; values stay as they are."""
    requests = make_requests([9], dtype=dtype, qk_norm=True)
    pool, heads = Pool(kernels, requests), requests.heads[0].clone()
    kernels.attend(heads, 2, requests.transform, pool.cache, pool.step((0, 0, 9)), scale=0.1)
    assert (heads[:, :6] != requests.heads[0][:, :6]).any(dim=-1).all()
    assert torch.equal(heads[:, 6:], requests.heads[0][:, 6:])


def test_only_the_tokens_slots_are_written(kernels: NativeKernels, dtype: torch.dtype) -> None:
    requests = make_requests(LENGTHS, dtype=dtype)
    pool = Pool(kernels, requests)
    pool.attend(*((request, 0, context) for request, context in enumerate(CONTEXT) if context))
    before = pool.cache.clone()
    spans: list[Span] = [(request, CONTEXT[request], length) for request, length in enumerate(LENGTHS)]
    pool.attend(*spans)
    num_tokens = sum(end - start for _, start, end in spans)
    assert int((pool.cache != before).sum()) == num_tokens * 2 * requests.num_kv_heads * requests.head_dim
    owned = {int(block) for block in pool.tables.flatten() if block}
    others = [block for block in range(len(pool.cache)) if block not in owned]
    assert torch.equal(pool.cache[others], before[others])


@pytest.mark.parametrize(
    "spans", [[], [(0, 3, 3)], [(0, 0, 0), (1, 0, 5)]], ids=["no-request", "no-token", "one-empty"]
)
def test_nothing_to_compute(kernels: NativeKernels, dtype: torch.dtype, spans: list[Span]) -> None:
    requests = make_requests([3, 5], dtype=dtype)
    pool = Pool(kernels, requests)
    step = replace(
        pool.step(*spans), block_tables=pool.tables[: len(spans)] if not spans else pool.step(*spans).block_tables
    )
    heads = torch.cat([requests.heads[r][start:end] for r, start, end in spans] or [requests.heads[0][:0]])
    output = kernels.attend(heads, 2, requests.transform, pool.cache, step, scale=0.125)
    assert len(output) == sum(end - start for _, start, end in spans)


# --- a token is computed by itself ---


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 40, "soft_cap": 5.0, "qk_norm": True, "rotary_dim": 24},
    {"window": 40, "sinks": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "block_size": 64},
    {"num_heads": 16, "num_kv_heads": 1, "head_dim": 16},
]


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all", "sinks", "gqa", "mqa"])
def test_the_same_whole_or_in_chunks_alone_or_together(
    kernels: NativeKernels, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Bit for bit, on any number of threads: what makes an answer independent of the scheduler."""
    requests = make_requests(LENGTHS, dtype=dtype, **options)
    torch.set_num_threads(1)
    expected = whole(kernels, requests)
    for threads, size in ((1, 300), (2, 300), (1, 64), (2, 33), (3, 100)):
        torch.set_num_threads(threads)
        for one, alone in zip(in_chunks(kernels, requests, size), expected, strict=True):
            assert torch.equal(one, alone), (threads, size)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize(
    "options", [{}, {"window": 700}, {"window": 300, "sinks": True}, {"num_heads": 6, "head_dim": 80}], ids=str
)
def test_threads_share_the_keys_of_a_few_long_requests(
    kernels: NativeKernels, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """A decode of one request, split by its keys, is bit for bit that of one thread, and of many requests."""
    requests = make_requests([1100, 40, 520, 1000, 90], dtype=dtype, **options)
    decodes: list[Span] = [(request, len(heads) - 1, len(heads)) for request, heads in enumerate(requests.heads)]
    pool = Pool(kernels, requests)
    pool.attend(*((request, 0, start) for request, start, _ in decodes))
    torch.set_num_threads(1)
    expected = pool.attend(*decodes)
    assert_close(expected[0], requests.expected(0)[-1:])
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for few in (decodes[:1], decodes[:2], decodes[1:4], decodes):
            for span, output in zip(few, pool.attend(*few), strict=True):
                assert torch.equal(output, expected[span[0]]), (threads, few)


def test_token_by_token(kernels: NativeKernels, dtype: torch.dtype) -> None:
    requests = make_requests([70, 41], dtype=dtype)
    for one, alone in zip(in_chunks(kernels, requests, 1), whole(kernels, requests), strict=True):
        assert torch.equal(one, alone)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_reaches_who_sees_it_and_nobody_else(
    kernels: NativeKernels, dtype: torch.dtype, part: str, soft_cap: float
) -> None:
    """Token 37 of one request is broken. Before a token, NaN must not be seen either, as chunks would show."""
    requests = make_requests([50, 60], dtype=dtype, soft_cap=soft_cap)
    clean = whole(kernels, requests)
    requests.heads[0][37, {"query": 0, "key": 4, "value": 6}[part], 3] = nan
    pool = Pool(kernels, requests)
    before, _ = pool.attend((0, 0, 37), (1, 0, 10))
    broken, other = pool.attend((0, 37, 50), (1, 10, 60))
    assert torch.equal(before, clean[0][:37]) and torch.equal(other, clean[1][10:])
    if part == "query":
        assert broken[0, 0].isnan().all()
        assert torch.equal(broken[1:], clean[0][38:]) and torch.equal(broken[0, 1:], clean[0][37, 1:])
    else:
        seen = broken[:, :2] if part == "key" else broken[:, :2, 3]  # the two query heads of the key head
        assert seen.isnan().all()
        assert torch.equal(broken[:, 2:], clean[0][37:, 2:])


# --- what is refused, and tracing ---


def arguments() -> dict[str, Any]:
    """A decode and a prompt: 8 tokens, 4 query and 2 key heads of 16, 5 blocks of 32."""
    return {
        "qkv": torch.zeros(8, 8, 16),
        "num_kv_heads": 2,
        "rope": torch.zeros(64, 2, 16),
        "q_norm": torch.ones(16),
        "k_norm": torch.ones(16),
        "eps": 1e-6,
        "scale": 0.25,
        "soft_cap": 0.0,
        "window": 0,
        "sinks": None,
        "cache": torch.zeros(5, 1, 2, 2, 1024),
        "query_start": torch.tensor([0, 1, 8], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 7], dtype=torch.int32),
        "block_tables": torch.tensor([[1, 4], [3, 0]]),
        "out": torch.zeros(8, 4, 16),
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "qkv-dtype": ("qkv", {name: arguments()[name].half() for name in ("qkv", "cache", "out")}),
    "qkv-dims": ("qkv", {"qkv": torch.zeros(8, 128)}),
    "qkv-strides": ("qkv", {"qkv": torch.zeros(8, 16, 8).mT}),
    "no-key-heads": ("key heads", {"num_kv_heads": 0}),
    "negative-key-heads": ("key heads", {"num_kv_heads": -1}),
    "no-query-heads": ("query heads", {"num_kv_heads": 4}),
    "uneven-groups": ("query heads", {"num_kv_heads": 3}),
    "huge-heads": ("head_dim", {"qkv": torch.zeros(8, 8, 544), "out": torch.zeros(8, 4, 544)}),
    "rope-dtype": ("rope", {"rope": torch.zeros(64, 2, 16).bfloat16()}),
    "rope-dims": ("rope", {"rope": torch.zeros(64, 32)}),
    "rope-odd": ("rope", {"rope": torch.zeros(64, 2, 15)}),
    "rope-wide": ("rope", {"rope": torch.zeros(64, 2, 18)}),
    "rope-short": ("request 0: 40 tokens, but 39 positions", {"rope": torch.zeros(39, 2, 16)}),
    "q_norm-size": ("q_norm", {"q_norm": torch.ones(8)}),
    "sinks-size": ("sinks", {"sinks": torch.zeros(2)}),
    "sinks-dtype": ("sinks", {"sinks": torch.zeros(4).bfloat16()}),
    "soft_cap-negative": ("soft_cap", {"soft_cap": -1.0}),
    "window-negative": ("window", {"window": -1}),
    "k_norm-dtype": ("k_norm", {"k_norm": torch.ones(16).bfloat16()}),
    "cache-dtype": ("cache", {"cache": torch.zeros(5, 1, 2, 2, 1024).bfloat16()}),
    "cache-heads": ("cache", {"cache": torch.zeros(5, 1, 2, 1, 1024)}),
    "cache-head-dim": ("cache", {"cache": torch.zeros(5, 1, 2, 2, 2048)}),
    "cache-strides": ("cache", {"cache": torch.zeros(5, 1, 2, 1024, 2).mT}),
    "cache-of-plain-layout": ("cache", {"cache": torch.zeros(5, 32, 4, 16)}),
    "cache-of-empty-blocks": ("cache", {"cache": torch.zeros(5, 0, 2, 2, 1024)}),
    "query_start-dtype": ("query_start", {"query_start": torch.tensor([0, 1, 8])}),
    "query_start-size": ("query_start", {"query_start": int32(0, 8)}),
    "query_start-empty": ("query_start", {"query_start": int32()}),
    "query_start-begin": ("query_start", {"query_start": int32(1, 2, 8)}),
    "query_start-end": ("query_start", {"query_start": int32(0, 1, 9)}),
    "query_start-falls": ("request 0: -1 new tokens", {"query_start": int32(0, -1, 8)}),
    "seq_lens-dtype": ("seq_lens", {"seq_lens": torch.tensor([40, 7])}),
    "seq_lens-size": ("query_start", {"seq_lens": int32(40, 7, 7)}),
    "seq_lens-short": ("request 1: 7 new tokens of 6", {"seq_lens": int32(40, 6)}),
    "seq_lens-negative": ("request 1: 7 new tokens of -7", {"seq_lens": int32(40, -7)}),
    "seq_lens-long": ("request 0: 3 blocks in a table of 2", {"seq_lens": int32(65, 7), "rope": None}),
    "block_tables-dtype": ("block_tables", {"block_tables": int32(1, 4, 3, 0).view(2, 2)}),
    "block_tables-rows": ("block_tables", {"block_tables": torch.tensor([[1, 4]])}),
    "block-beyond": ("request 0: block 5 of 5", {"block_tables": torch.tensor([[1, 5], [3, 0]])}),
    "block-negative": ("request 1: block -1 of 5", {"block_tables": torch.tensor([[1, 4], [-1, 0]])}),
    "out-shape": ("out", {"out": torch.zeros(8, 8, 16)}),
    "out-dtype": ("out", {"out": torch.zeros(8, 4, 16).bfloat16()}),
}


@pytest.mark.parametrize(("named", "changes"), WRONG.values(), ids=WRONG)
def test_what_is_refused(kernels: NativeKernels, named: str, changes: dict[str, Any]) -> None:
    kernels.attention(*arguments().values())
    with pytest.raises(RuntimeError, match=named):
        kernels.attention(*{**arguments(), **changes}.values())


def test_a_padded_table_is_not_looked_at_beyond_the_sequence(kernels: NativeKernels) -> None:
    kernels.attention(*{**arguments(), "block_tables": torch.tensor([[1, 4, -7], [3, 999, 999]])}.values())


def test_tracing(kernels: NativeKernels) -> None:
    """The schema says what is written, and the fake runs where there is no data."""
    changes = {"qkv": torch.randn(8, 8, 16), "rope": torch.randn(64, 2, 16)}
    values = tuple({**arguments(), **changes}.values())
    torch.library.opcheck(kernels.attention, values, test_utils=("test_schema", "test_faketensor"))
