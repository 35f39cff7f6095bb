"""The load-balance loss of a step, whose rows are on many ranks."""

import torch
from torch import Tensor

from models.balance import balance_loss
from parallel.sums import sum_over_ranks


def balance_part(chances_LE: Tensor, visits_LE: Tensor, active_experts: int, count: int) -> Tensor:
    """This rank's part of the loss, times the labels of all ranks, `count` of them here.

    The trainer divides by those, as it does for sums over labels. All ranks call it together. With
    several micro-batches each has a balance of its own, weighted by its labels.
    """
    if not visits_LE.numel():
        return chances_LE.sum()
    own = visits_LE.double()
    sums = sum_over_ranks(torch.cat([own.flatten(), own.new_full((1,), count)]))
    visits_LE, labels = sums[:-1].view_as(own), sums[-1]
    rows = (visits_LE[0].sum() / active_experts).clamp(min=1)
    return labels * balance_loss(chances_LE, visits_LE, rows)


def expert_load(visits_LE: Tensor) -> float:
    """Visits of the busiest expert of any layer, in multiples of its layer's mean."""
    load_LE = visits_LE / visits_LE.mean(1, keepdim=True).clamp(min=1)
    return load_LE.max().item()
