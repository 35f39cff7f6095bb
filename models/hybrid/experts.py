"""A mixture of experts without dropping: every row visits `k` of E experts and the shared one.

Legend: T rows, M hidden size, E experts, k experts a row, R = T * k visits, F expert size.

`Experts` gets the rows sorted by expert (`models.experts`) and where each expert's end, which is all
that an exchange between ranks with different experts needs to know.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.experts import leave, products, visit
from models.hybrid.shape import Shape
from models.precision import at_least_fp32


class Routed(NamedTuple):
    """What the router did with the rows: sums over them, which can be added over ranks."""

    visits_E: Tensor
    """Visits to each expert, int64."""
    chances_E: Tensor
    """The router's scores for each expert, normalized over experts, summed over rows; fp32."""


class Mlp(nn.Module):
    """A gated feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_TM: Tensor) -> Tensor:
        """(T, M)."""
        out_TM: Tensor = self.down_proj(
            nn.functional.silu(self.gate_proj(x_TM)) * self.up_proj(x_TM)
        )
        return out_TM


class Router(nn.Module):
    """Scores experts, and takes the best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)

    def forward(self, x_TM: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts of each row (T, k), their weights (T, k), and all normalized scores (T, E).

        `bias_E` is added for the choice only (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing").
        """
        logits_TE = at_least_fp32(self.gate(x_TM))
        if self.shape.router == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            chances_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + TINY)
        else:
            chances_TE = scores_TE = logits_TE.softmax(1)
        experts_Tk = (scores_TE + bias_E).topk(self.shape.active_experts, dim=1).indices
        weights_Tk = scores_TE.gather(1, experts_Tk)
        weights_Tk = weights_Tk / (weights_Tk.sum(1, keepdim=True) + TINY) * self.shape.route_scale
        return experts_Tk, weights_Tk, chances_TE


TINY = 1e-20


class Experts(nn.Module):
    """The weights of all experts, and the products with them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        E, F, M = shape.num_experts, shape.expert_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, F))

    def forward(self, x_RM: Tensor, ends_E: Tensor, weights_R: Tensor) -> Tensor:
        """(R, M): each row through its expert, times its weight.

        Rows are sorted by expert; those of expert e end before `ends_E[e]` (int32).
        """
        return self.visit(x_RM, ends_E, weights_R, self.gate_up_proj, self.down_proj)

    @staticmethod
    def visit(
        x_RM: Tensor, ends_E: Tensor, weights_R: Tensor, gate_up_ENM: Tensor, down_EMF: Tensor
    ) -> Tensor:
        """The same with given weights: where ranks divide experts, of those that are here."""
        gate_RF, up_RF = products(x_RM, gate_up_ENM, ends_E).chunk(2, dim=1)
        # before the second product, which is the same in fewer numbers
        hidden_RF = nn.functional.silu(gate_RF) * up_RF * weights_R[:, None].to(x_RM.dtype)
        return products(hidden_RF, down_EMF, ends_E)


class MixtureOfExperts(nn.Module):
    """Routed experts, and a shared one that every row visits."""

    expert_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = Mlp(shape.hidden_size, shape.expert_size * shape.shared_experts)
        # a buffer, since it has no gradient: whole on every rank, and never rounded to bf16
        self.register_buffer("expert_bias", torch.zeros(shape.num_experts))

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Routed]:
        """(T, M), and what the router did."""
        experts_Tk, weights_Tk, chances_TE = self.router(x_TM, self.expert_bias)
        visits = visit(x_TM, experts_Tk, len(self.expert_bias))
        weights_R = weights_Tk.flatten()[visits.order_R]
        out_RM = self.experts(visits.x_RM, visits.ends_E, weights_R)
        out_TM = leave(out_RM, visits, experts_Tk.shape[1])
        routed = Routed(visits.counts_E(), chances_TE.sum(0))
        return self.shared_experts(x_TM) + out_TM, routed
