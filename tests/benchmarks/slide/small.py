"""A packed set small enough for tests."""

import numpy as np

from benchmarks.slide.sets import pack
from models.slide.ids import make_ids
from recipes.slide.data import Data
from tests.recipes.slide.stages import PLANTED


def planted(folder):
    """The data that a stage reads, and the same as a packed file."""
    data = Data(PLANTED, "none")
    space = np.stack(np.meshgrid(*[np.arange(6)] * 3, indexing="ij"), -1).reshape(-1, 3)
    rows = np.random.default_rng(0).permutation(len(space))[: data.sequences.num_items]
    data.ids = make_ids(space[rows], [6, 6, 6])
    pack(data, folder / "planted.npz")
    return data, folder / "planted.npz"
