"""The head: fp32 logits from bf16 matrices."""

from __future__ import annotations

import pytest
import torch

from miniserve.layers.embedding import output_logits


@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_close_logits_keep_their_order(num_rows: int) -> None:
    """Bug: near 25, bf16 logits come in steps of 0.125, and the best token lost against a tie with a smaller id."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, 64, generator=generator).bfloat16()
    weight = (torch.randn(3000, 64, generator=generator) * 0.1).bfloat16()
    weight[100:140] = (hidden[0].float() * 0.4 + torch.randn(40, 64, generator=generator) * 0.01).bfloat16()
    exact = hidden.double() @ weight.double().T
    assert (exact[0, 100:140].max() - exact[0, 100:140].min()) < 1.0 and exact[0].max() > 16
    logits = output_logits(hidden, weight)
    assert logits.dtype == torch.float32 and logits.shape == (num_rows, 3000)
    assert logits.argmax(dim=-1).tolist() == exact.argmax(dim=-1).tolist()
    assert logits[0].topk(40).indices.tolist() == exact[0].topk(40).indices.tolist()
    torch.testing.assert_close(logits.double(), exact, atol=0.05, rtol=2**-8)


def test_fp32_is_the_plain_product() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 8, generator=generator), torch.randn(20, 8, generator=generator)
    torch.testing.assert_close(output_logits(hidden, weight), hidden @ weight.T)


def test_a_vocabulary_smaller_than_what_is_made_exact() -> None:
    hidden, weight = torch.ones(2, 4).bfloat16(), torch.eye(5, 4).bfloat16()
    assert output_logits(hidden, weight).tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0]] * 2
