"""Drawing tokens: the operator and its twin against a slow race in double precision, and what seeds promise."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniserve.kernels import sampling
from miniserve.kernels.native import Draw, NativeKernels
from miniserve.kernels.sampling import SamplingOperators, uniform_noise

PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
KINDS = [
    PLAIN,
    replace(PLAIN, temperature=0.3),
    replace(PLAIN, temperature=2.0),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999),
    replace(PLAIN, top_p=1e-6),
    replace(PLAIN, top_k=50),
    replace(PLAIN, top_k=1),
    replace(PLAIN, top_k=3000),
    replace(PLAIN, top_k=10**12),
    replace(PLAIN, min_p=0.05),
    replace(PLAIN, min_p=1.0),
    replace(PLAIN, top_k=200, top_p=0.8, min_p=0.01, temperature=1.5),
    replace(PLAIN, top_k=5, top_p=0.95, temperature=0.01),
]
SLACK = 1e-5


def operators_of(kernels: NativeKernels) -> tuple[SamplingOperators, SamplingOperators]:
    return kernels, sampling


def random_logits(num_rows: int, size: int, *, scale: float = 4.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(operators: SamplingOperators, logits: Tensor, draws: list[Draw]) -> list[int]:
    ids: list[int] = operators.draw(logits, logits.argmax(-1), draws).tolist()
    return ids


def kept(logits: NDArray[np.float64], draw: Draw, slack: float) -> NDArray[np.bool_]:
    """The tokens that stay, one filter after the other; a larger slack keeps more."""
    order = np.lexsort((np.arange(len(logits)), -logits))  # larger values first, then smaller ids
    scores = logits[order] / draw.temperature
    weights = np.exp(scores - scores[0])
    if draw.top_k > 0:
        weights[draw.top_k :] = 0
    probs = weights / weights.sum()
    stays = weights > 0
    if draw.top_p < 1:
        stays &= np.cumsum(probs) - probs < draw.top_p + slack
    stays &= weights >= draw.min_p * (1 - slack)
    stays[0] = True
    result = np.zeros(len(logits), dtype=bool)
    result[order[stays]] = True
    return result


def check(logits: Tensor, draws: list[Draw], drawn: list[int]) -> None:
    """Each token wins its race; rounding may decide between two that are as good as equal."""
    for row, own, token_id in zip(logits.double().numpy(), draws, drawn, strict=True):
        noise = uniform_noise(torch.tensor([[own.seed]]), torch.arange(len(row)))[0].double().numpy()
        with np.errstate(under="ignore"):
            scores = np.exp((row - row.max()) / own.temperature) / -np.log1p(-noise)
        assert kept(row, own, SLACK)[token_id]
        assert scores[token_id] >= scores[kept(row, own, -SLACK)].max() * (1 - SLACK)


@pytest.mark.parametrize("scale", [0.001, 1.0, 4.0])
@pytest.mark.parametrize("size", [1, 7, 16, 1000, 3001])
def test_against_a_slow_race(kernels: NativeKernels, size: int, scale: float) -> None:
    logits = random_logits(3 * len(KINDS), size, scale=scale)
    draws = [replace(kind, seed=2**62 + index) for index, kind in enumerate(KINDS * 3)]
    drawn = draw(kernels, logits, draws)
    check(logits, draws, drawn)
    check(logits, draws, draw(sampling, logits, draws))


@pytest.mark.parametrize("size", [49152, 151936])
def test_large_vocabularies(kernels: NativeKernels, size: int) -> None:
    """Also that operator and twin draw the same: a seed gives the same answer on every device."""
    logits = random_logits(len(KINDS), size)
    draws = [replace(kind, seed=index) for index, kind in enumerate(KINDS)]
    drawn = draw(kernels, logits, draws)
    check(logits, draws, drawn)
    assert drawn == draw(sampling, logits, draws)


@pytest.mark.usefixtures("threads_restored")
def test_alone_as_in_any_batch(kernels: NativeKernels) -> None:
    logits = random_logits(17, 5003)
    draws = [replace(KINDS[index % len(KINDS)], seed=index) for index in range(17)]
    torch.set_num_threads(1)
    alone = [draw(kernels, logits[index : index + 1], [own])[0] for index, own in enumerate(draws)]
    assert len(set(alone)) > 8
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for num_rows in range(18):
            assert draw(kernels, logits[:num_rows], draws[:num_rows]) == alone[:num_rows]


def test_a_row_without_a_draw_keeps_the_likeliest(kernels: NativeKernels) -> None:
    logits = torch.zeros(2, 1000)
    for operators in operators_of(kernels):
        drawn = operators.draw(logits, torch.tensor([0, 0]), [None, PLAIN])
        assert drawn[0] == 0 and drawn[1] != 0


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("kind", [{"top_k": 3}, {"top_p": 0.0025}, {"top_k": 900, "top_p": 0.0025}])
def test_of_equals_the_first_stay(kernels: NativeKernels, kind: dict[str, Any], first: int) -> None:
    logits = torch.zeros(1, 1000)
    logits[:, :first] = -50.0
    draws = [replace(PLAIN, seed=seed, **kind) for seed in range(300)]
    expected = {first, first + 1, first + 2}
    assert set(draw(kernels, logits.expand(300, -1).contiguous(), draws)) == expected


def test_top_p_of_the_same_rounded_weight(kernels: NativeKernels) -> None:
    """Logits that differ are told apart, also where their weights are the same number."""
    logits = torch.full((1, 100), 1.0)
    logits[0, 70] = 1.0 + 2**-23
    draws = [replace(PLAIN, top_k=1), replace(PLAIN, top_p=0.005), replace(PLAIN, top_k=2)]
    drawn = [draw(kernels, logits, [replace(own, temperature=1.9)])[0] for own in draws]
    assert drawn[:2] == [70, 70] and drawn[2] in (70, 0)


def test_what_is_not_finite_harms_nobody(kernels: NativeKernels) -> None:
    """A broken row has some id of the vocabulary; -inf is never drawn, and neighbours do not notice."""
    logits = random_logits(6, 1000)
    draws = [replace(KINDS[index], seed=index) for index in (0, 3, 6, 10, 12, 3)]
    expected = draw(kernels, logits, draws)
    for value, place in ((nan, 0), (nan, 500), (inf, 999)):
        broken = logits.clone()
        broken[1::2, place] = value
        broken[3] = -inf
        for operators in operators_of(kernels):
            drawn = operators.draw(broken, operators.largest(broken)[0], draws).tolist()
            assert drawn[::2] == expected[::2]
            assert all(0 <= token_id < 1000 for token_id in drawn)
    logits[:, 30:] = -inf
    for operators in operators_of(kernels):
        assert max(draw(operators, logits, draws)) < 30


@pytest.mark.parametrize("temperature", [1.1e-4, 2.0])
def test_logits_that_overflow(kernels: NativeKernels, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1e36, 1.0, -1e38] * 10, [-3e38, 0.0, 3e38, 1.0] * 10])
    for kind in KINDS:
        drawn = draw(kernels, logits, [replace(kind, temperature=temperature)] * 2)
        assert drawn[0] % 4 == 1 and drawn[1] % 4 == 2


# The distribution


def chi_square(drawn: list[int], probs: Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probs)).double()
    expected = probs.double() * len(drawn)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", [PLAIN, replace(PLAIN, top_k=8), replace(PLAIN, top_p=0.7), replace(PLAIN, min_p=0.3)])
def test_the_distribution(kernels: NativeKernels, kind: Draw) -> None:
    """With at most 19 degrees of freedom, 80 is exceeded once in 10 ** 9 times."""
    logits = random_logits(1, 20, scale=1.0)
    weights, token_ids = sampling.filtered_weights(logits, [kind])
    probs = torch.zeros(20).scatter(0, token_ids[0], weights[0] / weights.sum())
    draws = [replace(kind, seed=seed) for seed in range(20_000)]
    drawn = draw(kernels, logits.expand(20_000, -1).contiguous(), draws)
    stays = probs > 0
    assert set(drawn) == set(stays.nonzero().flatten().tolist())
    places = (stays.cumsum(0) - 1).tolist()
    compact = [places[token_id] for token_id in drawn]
    assert chi_square(compact, probs[stays]) < 80
    assert chi_square(compact, (probs[stays] ** 1.3) / (probs[stays] ** 1.3).sum()) > 80  # guard: it would be noticed


def test_noise_is_uniform_and_independent() -> None:
    """Over tokens, and over seeds that differ in one bit: two rows, or neighbours in a row, fill 16 x 16 cells evenly.

    With 255 degrees of freedom, chi-square exceeds 420 once in 10 ** 9 times.
    """
    token_ids = torch.arange(150_000)
    seeds = [0, *(1 << bit for bit in range(63)), 2**63 - 1]
    noise = uniform_noise(torch.tensor(seeds).unsqueeze(1), token_ids)
    assert noise.min() >= 2.0**-33 and noise.max() < 1
    cells = (noise * 16).long()
    fair = torch.full((256,), 1 / 256)
    for row in range(1, len(seeds)):
        for table in (cells[0] * 16 + cells[row], cells[row, 1:] * 16 + cells[row, :-1]):
            assert chi_square(table.tolist(), fair) < 420
        assert chi_square((noise[row] * 256).long().tolist(), fair) < 420


def test_the_smallest_noise_of_a_row() -> None:
    """What decides a race: the smallest of n is exponential too, and every token has it as often."""
    size, num_rows = 1000, 20_000
    smallest = [
        uniform_noise(torch.arange(first, first + 1000).unsqueeze(1), torch.arange(size)).min(dim=1)
        for first in range(0, num_rows, 1000)
    ]
    values = torch.cat([best.values for best in smallest]).double()
    quantiles = ((1 - (1 - values) ** size) * 32).long().clamp(max=31)
    assert chi_square(quantiles.tolist(), torch.full((32,), 1 / 32)) < 105  # 31 degrees of freedom, as above
    places = torch.cat([best.indices for best in smallest]) // 20
    assert chi_square(places.tolist(), torch.full((50,), 1 / 50)) < 135  # 49 degrees


def test_noise_does_not_change() -> None:
    """A seeded answer stays what it is from version to version."""
    noise = uniform_noise(torch.tensor([[0], [2**63 - 1], [1234567890123456789]]), torch.tensor([0, 1, 151935]))
    assert (noise.double() * 2**32).long().tolist() == [
        [2926543104, 3818772992, 73790520],
        [1812577152, 61890232, 382343488],
        [3240893440, 768525440, 2045457408],
    ]


def arguments(**changed: Tensor) -> list[Tensor]:
    fine = {
        "logits": torch.zeros(2, 5),
        "temperature": torch.ones(2),
        "top_k": torch.zeros(2).long(),
        "top_p": torch.ones(2),
        "min_p": torch.zeros(2),
        "seeds": torch.zeros(2).long(),
        "ids": torch.zeros(2).long(),
    }
    return list({**fine, **changed}.values())


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("logits", torch.zeros(2, 5).double()),
        ("temperature", torch.ones(3)),
        ("top_k", torch.zeros(2)),
        ("top_p", torch.ones(2).double()),
        ("min_p", torch.zeros(2, 1)),
        ("seeds", torch.zeros(1).long()),
        ("ids", torch.tensor([0, 5])),
        ("ids", torch.tensor([-1, 0])),
    ],
)
def test_what_is_refused(kernels: NativeKernels, named: str, value: Tensor) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels._draw(*arguments(**{named: value}))


def test_tracing(kernels: NativeKernels) -> None:
    torch.library.opcheck(kernels._draw, tuple(arguments()), test_utils=("test_schema", "test_faketensor"))
