"""Small agreements between ranks on the host: sums of a few numbers, without touching a device.

The default process group must have a CPU backend (`cpu:gloo,cuda:nccl` on GPUs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PendingSum:
    """A sum under way; `wait` once, on every rank."""

    values: Tensor
    work: Any

    def wait(self) -> list[float]:
        """The sums over all ranks, once every rank has started its part."""
        if self.work is not None:
            self.work.wait()
        return [float(value) for value in self.values.tolist()]


def start_sum(values: Sequence[float]) -> PendingSum:
    """Begin summing `values` over all ranks, element by element, in fp64; every rank calls it."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    work = dist.all_reduce(tensor, async_op=True) if dist.is_initialized() else None
    return PendingSum(tensor, work)


def all_sum(values: Sequence[float]) -> list[float]:
    """`values` summed over all ranks."""
    return start_sum(values).wait()


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's `value` (anything that pickles) on every rank; `group` has all ranks, too."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def all_gather(values: Sequence[float]) -> list[list[float]]:
    """Every rank's `values` (equally many), by rank, on every rank."""
    own = torch.tensor(list(values), dtype=torch.float64)
    if not dist.is_initialized():
        return [own.tolist()]
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything that pickles), by rank, on every rank; `group` has all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
