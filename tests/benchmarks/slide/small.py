"""A packed set small enough for tests."""

import torch.distributed as dist

from benchmarks.slide.sets import pack
from recipes.slide.data import Data
from tests.recipes.slide.stages import PLANTED, build_ids, one_rank


def planted(folder):
    """The data that a stage reads, and the same as a packed file."""
    one_rank()
    try:
        data = Data(PLANTED, build_ids(folder / "sids"))
        pack(data, folder / "planted.npz")
    finally:
        dist.destroy_process_group()
    return data, folder / "planted.npz"
