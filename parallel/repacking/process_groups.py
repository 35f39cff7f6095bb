"""Process groups for parents and children: every aligned block of ranks has one, made once.

Making a group takes all ranks and a while, so none is made in a step. A plan may use any block whose
width is a power of two and which begins at a multiple of it.
"""

import torch.distributed as dist

Groups = dict[tuple[int, int], dist.ProcessGroup | None]
"""By first rank and width."""


def aligned_blocks(num_ranks: int, widest: int) -> list[tuple[int, int]]:
    """First rank and width of every block that a plan may use, of 2 to `widest` ranks."""
    found, width = [], 2
    while width <= widest:
        found += [(first, width) for first in range(0, num_ranks - width + 1, width)]
        width *= 2
    return found


def make_groups(widest: int, device_type: str) -> Groups:
    """A group for every aligned block of up to `widest` ranks; every rank calls it, at the same place.

    Those of other ranks are in it, but cannot be used. One rank needs no group, and all ranks have
    theirs already.
    """
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    backend = "nccl" if device_type == "cuda" else "gloo"
    groups: Groups = {(rank, 1): None}
    for first, width in aligned_blocks(num_ranks, widest):
        if width == num_ranks:
            groups[first, width] = dist.group.WORLD
        else:
            ranks = list(range(first, first + width))
            groups[first, width] = dist.new_group(ranks, backend=backend)
    return groups
