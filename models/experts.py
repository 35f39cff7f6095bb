"""The rows of a mixture of experts, sorted by expert, and products with the experts' matrices.

Legend: T rows, M hidden size, E experts, k experts a row, R = T * k visits, F expert size, K and N sizes
of a matrix.

Visits are sorted by expert, with a stable sort, so that each expert reads consecutive rows and the order
of every sum is decided by the rows alone.

transformers hands every mixture's rows to a function registered under a name. Ours computes what its own
does, in the order above: gradients of rows are sums of consecutive ones, where indexing would add them
atomically or sort once more, and weights are applied before the second product, which is the same in
fewer numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from models.permutation import inverse

NAME = "springtide_grouped"


class Visits(NamedTuple):
    """Rows in the order of their visits."""

    x_RM: Tensor
    ends_E: Tensor
    """Rows of expert e end before `ends_E[e]`; int32."""
    order_R: Tensor
    """Which of the T * k visits each is."""
    place_R: Tensor
    """Where each of the T * k visits is."""

    def counts_E(self) -> Tensor:  # noqa: N802
        """Visits to each expert, int64."""
        return self.ends_E.long().diff(prepend=self.ends_E.new_zeros(1).long())


def visit(x_TM: Tensor, experts_Tk: Tensor, num_experts: int) -> Visits:
    """Sort the visits of the rows by expert; `experts_Tk` are the experts of each row."""
    expert_R, order_R = experts_Tk.flatten().sort(stable=True)
    number_E = torch.arange(num_experts, device=x_TM.device)
    ends_E = torch.searchsorted(expert_R, number_E, right=True)
    place_R = inverse(order_R)
    x_RM = _Visit.apply(x_TM, order_R, place_R, experts_Tk.shape[1])
    return Visits(x_RM, ends_E.int(), order_R, place_R)


def leave(out_RM: Tensor, visits: Visits, k: int) -> Tensor:
    """The way back from `visit`: the sum of each row's k visits, (T, M)."""
    back_RM: Tensor = _Return.apply(out_RM, visits.order_R, visits.place_R)
    return back_RM.unflatten(0, (-1, k)).sum(1)


def products(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert, transposed: (R, N). Rows are sorted by expert."""
    if x_RK.device.type == "meta" or not len(x_RK):  # one expert has all rows: as many products
        return nn.functional.linear(x_RK, weight_ENK[0])
    if x_RK.device.type == "cuda" and x_RK.dtype == torch.bfloat16:
        return grouped_products(x_RK, weight_ENK, ends_E)
    return looped_products(x_RK, weight_ENK, ends_E)


def grouped_products(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """In one kernel, in bf16; nothing waits for the device."""
    out_RN: Tensor = nn.functional.grouped_mm(x_RK, weight_ENK.transpose(1, 2), offs=ends_E)
    return out_RN


def looped_products(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """One after the other, in any type."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(x_RK.split(sizes), weight_ENK.unbind(), strict=True)
    return torch.cat([nn.functional.linear(x_rK, weight_NK) for x_rK, weight_NK in parts])


def experts_forward(module: Any, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """What a `module` of transformers that holds a layer's experts makes of its rows: (T, M).

    Experts of another form than two matrices, gated and without bias, are left to transformers' own
    grouped products.
    """
    others = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    if not module.has_gate or any(getattr(module, name, False) for name in others):
        out: Tensor = grouped_mm_experts_forward(module, x_TM, experts_Tk, weights_Tk)
        return out
    visits = visit(x_TM, experts_Tk, len(module.gate_up_proj))
    hidden_RF = module._apply_gate(products(visits.x_RM, module.gate_up_proj, visits.ends_E))
    weights_R = weights_Tk.flatten()[visits.order_R]
    hidden_RF = hidden_RF * weights_R[:, None].to(hidden_RF.dtype)
    out_RM = products(hidden_RF, module.down_proj, visits.ends_E)
    return leave(out_RM, visits, experts_Tk.shape[1])


class _Visit(torch.autograd.Function):
    """Rows in the order of their visits; the gradient sums a row's visits in the order of its experts.

    Indexing would do the same, but its gradient adds atomically, or sorts once more.
    """

    @staticmethod
    def forward(context: Any, x_TM: Tensor, order_R: Tensor, place_R: Tensor, k: int) -> Tensor:
        context.save_for_backward(place_R)
        context.k = k
        return x_TM[order_R // k]

    @staticmethod
    def backward(context: Any, grad_RM: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = context.saved_tensors
        return grad_RM[place_R].unflatten(0, (-1, context.k)).sum(1), None, None, None


class _Return(torch.autograd.Function):
    """The way back: visits in the order of their rows."""

    @staticmethod
    def forward(context: Any, x_RM: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        context.save_for_backward(order_R)
        return x_RM[place_R]

    @staticmethod
    def backward(context: Any, grad_RM: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = context.saved_tensors
        return grad_RM[order_R], None, None


ExpertsInterface.register(NAME, experts_forward)
