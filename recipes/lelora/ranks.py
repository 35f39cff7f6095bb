"""This process among the ranks; alone where no group of processes was made."""

import torch.distributed as dist


def this_rank() -> int:
    """Its number, 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1
