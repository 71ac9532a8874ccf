"""How a block branches off the residual stream and comes back: norms on either side, and a factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miniserve.kernels.native import Matrix
from miniserve.layers.linear import Linear
from miniserve.layers.norm import RMSNorm


class Branch(nn.Module):
    """residual += scale x post_norm(block(norm(residual))), where either norm may be missing.

    The block applies `norm` itself, within its first product.
    """

    def __init__(self, norm: RMSNorm | None, post_norm: RMSNorm | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.post_norm, self.scale = norm, post_norm, scale

    @property
    def only_adds(self) -> bool:
        """Whether what the block gives is added as it is."""
        return self.post_norm is None and self.scale == 1.0

    def add_(self, residual: Tensor, linear: Linear, x: Tensor) -> None:
        """Add what the block's last product gives of x [num_tokens, linear.in_features].

        residual: fp32 [num_tokens, hidden_size], updated in place.
        """
        if self.only_adds:
            linear.add_to_(residual, x)
        else:
            self.add_rows_(residual, linear(x), linear.native)

    def add_rows_(self, residual: Tensor, rows: Tensor, native: Matrix | None) -> None:
        """Add what the block gave, `rows` [num_tokens, hidden_size]; by the kernels of `native`, if there are any."""
        if native is not None:
            native.kernels.add_(residual, rows, None if self.post_norm is None else self.post_norm.native, self.scale)
        else:
            residual.add_(rows if self.post_norm is None else self.post_norm(rows, torch.float32), alpha=self.scale)
