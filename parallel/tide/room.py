"""Whether the memory that TIDE needs is there, found out before anybody allocates any."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

GIB = 2**30
MARGIN = GIB // 8
"""Left to the driver's own tables and to rounding."""


class SymmetricMemoryError(RuntimeError):
    """There is not enough memory for slots and staging; the message says what they take."""


@dataclass(frozen=True)
class Needs:
    """Bytes of symmetric memory on each rank."""

    shared: Sequence[int]
    """Of each slot that layers take turns in."""
    private: Sequence[int]
    """Of each slot of a layer that stays gathered."""
    staging: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.shared) + sum(self.private) + self.staging


def check_room(needs: Needs, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `SymmetricMemoryError` on every rank of `group` if one has too little memory left."""
    torch.cuda.empty_cache()  # what torch keeps for later is no use to others
    free: list[int] = [0] * group.size()
    dist.all_gather_object(free, torch.cuda.mem_get_info(device)[0], group=group)
    least = min(free)
    if least < needs.total + MARGIN:
        rank = dist.get_process_group_ranks(group)[free.index(least)]
        raise SymmetricMemoryError(too_little(needs, least, rank))


def too_little(needs: Needs, free: int, rank: int) -> str:
    """What to say about it."""
    slot, kept = max(needs.shared, default=0), sum(needs.private)
    return (
        f"TIDE needs {needs.total / GIB:.2f} GiB of GPU memory on each rank, and rank {rank} has "
        f"{free / GIB:.2f} GiB left: {len(needs.shared)} slots of {slot / GIB:.2f} GiB for layers in "
        f"turn, {kept / GIB:.2f} GiB for layers that stay gathered, {needs.staging / GIB:.2f} GiB to "
        "stage gradients. Set parallel.prefetch=0 for fewer slots, collectives.chunk for less "
        "staging, parallel.reshard_after_forward=true if layers stay gathered, smaller batches, or "
        "collectives=stock"
    )
