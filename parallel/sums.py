"""Sums over all ranks of what a loss needs to know of the others' rows."""

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.waits import waiting


@torch.no_grad()
def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` added up over all ranks, element by element, where they are; every rank calls it.

    Without a process group (a plan, one process) they are the sum themselves.
    """
    total = values.clone()
    if dist.is_initialized():
        with waiting():
            dist.all_reduce(total)
    return total
