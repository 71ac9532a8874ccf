"""A mixture of experts (Shazeer et al., 2017): many small feed-forwards, of which each token passes through a few.

A router scores the experts for each token; the best few compute, and their results are summed by their share of the
softmax. The tokens of a step are grouped by expert, so that an expert's weights are read once, and only if somebody
needs them. A token's sum is in the order of the experts: nothing else in the step changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from miniserve.layers.branch import Branch
from miniserve.layers.linear import Linear
from miniserve.layers.mlp import Activation, GateUp
from miniserve.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer.

    Attributes:
        num_experts, num_active: how many there are, and how many of them a token passes through.
        intermediate_size: of each.
        normalise: whether the shares of those that a token passes through are made to sum to one.
        bias: whether the router and the experts have biases.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    normalise: bool
    bias: bool = False


class MoE(nn.Module):
    """The feed-forward block of a layer with experts."""

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        *,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.router = Router(hidden_size, config, device=device)
        self.experts = nn.ModuleList(
            Expert(hidden_size, config, activation=activation, dtype=dtype, device=device)
            for _ in range(config.num_experts)
        )

    def forward(self, residual: Tensor, branch: Branch) -> None:
        """residual, fp32 [num_tokens, hidden_size], gets its feed-forward added, through the norms of `branch`."""
        shares, chosen = self.router(residual, branch.norm)
        x = residual.to(self.dtype) if branch.norm is None else branch.norm(residual, self.dtype)
        total = torch.zeros_like(residual)
        for index in chosen.unique().tolist():
            rows, places = (chosen == index).nonzero(as_tuple=True)
            total.index_add_(0, rows, self.experts[index](x[rows]) * shares[rows, places].unsqueeze(1))
        branch.add_rows_(residual, total, self.router.scores.native)


class Router(nn.Module):
    """Which experts a token passes through, and their shares. In fp32: a near tie must not be decided by rounding."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, *, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.scores = Linear(hidden_size, config.num_experts, bias=config.bias, dtype=torch.float32, device=device)
        self.scores.may_be_small = False

    def forward(self, residual: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """residual: fp32 [num_tokens, hidden_size] -> shares fp32 and experts int64, each [num_tokens, num_active]."""
        probs = self.scores(residual, norm).softmax(dim=-1)
        shares, chosen = probs.topk(self.config.num_active, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True) if self.config.normalise else shares, chosen


class Expert(nn.Module):
    """One feed-forward: [num_tokens, hidden_size] -> the same."""

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        *,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.bias
        self.gate_up = GateUp(hidden_size, size, activation=activation, bias=bias, dtype=dtype, device=device)
        self.down = Linear(size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size], in the model's dtype."""
        result: Tensor = self.down(self.gate_up(x))
        return result
