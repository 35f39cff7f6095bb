"""Rows go to the ranks of their experts and come back: one all-to-all there, one back, nothing dropped.

    sizes = announce(ends_E, R, ranks)                       # the host waits here, and nowhere else
    x_rM, weights_r = to_experts(x_RM, weights_R, sizes)     # sorted by this rank's experts
    out_RM = to_rows(visit(x_rM, sizes.ends_e, weights_r), sizes)

How many rows go where follows from the router, so ranks tell each other first: one small all-to-all of
counts, whose sums the host must know before it can start the large ones. Rows that are sorted by expert
are sorted by rank, so they are sent as they lie; weights travel beside them. What arrives is sorted by
rank and then by expert, and each expert's rows are put together in the order of the ranks: which row is
added to which, and when, depends on the rows alone. The backward pass is the transpose, with the same
sizes. Ranks without rows take part.

Legend: R visits of this rank's rows, r visits to this rank's experts, M hidden size, E experts, e those
of this rank, P ranks of the block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.waits import waiting

BESIDE = 8
"""Columns beside a row, of which the weight fills one: so that rows of bf16 stay aligned to 16 bytes."""


@dataclass(eq=False)
class ExpertRanks:
    """The ranks that divide the experts of a layer among them, as one of them sees it."""

    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None: there is none, and nothing can travel."""
    foreseen: float = 0.0
    """Bytes that passes on meta would have sent to the other ranks, if experts were visited evenly."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """How many rows of one layer go where, in one pass."""

    ranks: ExpertRanks
    sends: list[int]
    """To each rank of the block."""
    receives: list[int]
    ends_e: Tensor
    """Where the rows of each of this rank's experts end, int32."""
    order_r: Tensor
    """Of the rows sorted by expert, the place of each among those that arrived."""
    place_r: Tensor
    """The inverse: where each row that arrived belongs."""


@torch.no_grad()
def announce(ends_E: Tensor, num_rows: int, ranks: ExpertRanks) -> Sizes:
    """Tell the others how many of this rank's `num_rows` sorted rows each of their experts gets.

    `ends_E`: where each expert's rows end. Every rank of the block calls it, one without rows, too.
    """
    if ends_E.device.type == "meta":
        return _evenly(ends_E, num_rows, ranks)
    sent_Pe = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ranks.size, -1)
    arrived_Pe = torch.empty_like(sent_Pe)
    with waiting():
        dist.all_to_all_single(arrived_Pe, sent_Pe, group=ranks.group)
        sends, receives = torch.stack([sent_Pe.sum(1), arrived_Pe.sum(1)]).tolist()
    order_r, place_r = regroup(arrived_Pe, sum(receives))
    ends_e = arrived_Pe.sum(0).cumsum(0).int()
    return Sizes(ranks, sends, receives, ends_e, order_r, place_r)


def regroup(visits_Pe: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Between rows by rank and then by expert, and rows by expert and then by rank: `Sizes` has both."""
    P, e = visits_Pe.shape
    visits_eP = visits_Pe.T.contiguous()
    begin_Pe = (visits_Pe.flatten().cumsum(0) - visits_Pe.flatten()).view(P, e)
    begin_eP = (visits_eP.flatten().cumsum(0) - visits_eP.flatten()).view(e, P)
    shift_Pe = begin_eP.T - begin_Pe
    row_r = torch.arange(num_rows, device=visits_Pe.device)
    # with `output_size`, nothing waits for the device
    shift_r = shift_Pe.flatten().repeat_interleave(visits_Pe.flatten(), output_size=num_rows)
    back_r = shift_Pe.T.flatten().repeat_interleave(visits_eP.flatten(), output_size=num_rows)
    return row_r - back_r, row_r + shift_r


def _evenly(ends_E: Tensor, num_rows: int, ranks: ExpertRanks) -> Sizes:
    """On meta every rank gets as many rows as it has."""
    rows = [num_rows] + [0] * (ranks.size - 1)
    index_r = ends_E.new_empty(num_rows, dtype=torch.long)
    return Sizes(ranks, rows, rows, ends_E[: len(ends_E) // ranks.size], index_r, index_r)


def to_experts(x_RM: Tensor, weights_R: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The rows that visit this rank's experts (r, M), sorted by expert, and their weights (r,).

    Both of one type. Every rank of the block calls it.
    """
    x_rM, weights_r = _ToExperts.apply(x_RM, weights_R, sizes)
    return x_rM, weights_r


def to_rows(out_rM: Tensor, sizes: Sizes) -> Tensor:
    """What experts made of rows, back where these are, (R, M); every rank of the block calls it."""
    out_RM: Tensor = _ToRows.apply(out_rM, sizes)
    return out_RM


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x_RM: Tensor, weights_R: Tensor, sizes: Sizes
    ) -> tuple[Tensor, Tensor]:
        context.save_for_backward(sizes.place_r)
        context.way = sizes.ranks, sizes.receives, sizes.sends
        M = x_RM.shape[1]
        arrived = all_to_all(beside(x_RM, weights_R), sizes.ranks, sizes.sends, sizes.receives)
        return arrived[:, :M].index_select(0, sizes.order_r), arrived[:, M][sizes.order_r]

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_rM: Tensor, grad_r: Tensor) -> tuple[Tensor, Tensor, None]:
        (place_r,) = context.saved_tensors
        M = grad_rM.shape[1]
        arrived = all_to_all(beside(grad_rM[place_r], grad_r[place_r]), *context.way)
        return arrived[:, :M], arrived[:, M], None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, out_rM: Tensor, sizes: Sizes) -> Tensor:
        context.save_for_backward(sizes.order_r)
        context.way = sizes.ranks, sizes.sends, sizes.receives
        return all_to_all(out_rM[sizes.place_r], sizes.ranks, sizes.receives, sizes.sends)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_RM: Tensor) -> tuple[Tensor, None]:
        (order_r,) = context.saved_tensors
        return all_to_all(grad_RM.contiguous(), *context.way)[order_r], None


def beside(x_RM: Tensor, weights_R: Tensor) -> Tensor:
    """Each row with its weight beside it, (R, M + BESIDE)."""
    return torch.cat([x_RM, nn.functional.pad(weights_R[:, None], (0, BESIDE - 1))], dim=1)


def all_to_all(
    sent_RN: Tensor, ranks: ExpertRanks, sends: list[int], receives: list[int]
) -> Tensor:
    """The rows that all ranks of the block have for this one, in their order; on meta, counted only."""
    arrived_rN = sent_RN.new_empty(sum(receives), sent_RN.shape[1])
    if sent_RN.device.type == "meta":
        ranks.foreseen += sent_RN.nbytes * (ranks.size - 1) / ranks.size
        return arrived_rN
    with waiting():
        dist.all_to_all_single(arrived_rN, sent_RN, receives, sends, group=ranks.group)
    return arrived_rN
