"""The valid semantic IDs as tables on the device, so that no step of a decoder needs the host.

I items, L levels, S states (the root is 0, the leaves are the last F), N inner states, C codes of the
largest level, R items of the fullest leaf
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.slide.ids import SemanticIds
from models.slide.model import offsets

MOST_ENTRIES = 64 * 2**20
"""Of the dense table; 256 MiB."""


@dataclass(frozen=True)
class Trie:
    """All tables are on one device."""

    child_NC: Tensor
    """The state that a code leads to, or -1."""
    items_S: Tensor
    """How many items are below a state."""
    leaf_items_FR: Tensor
    """The items of each leaf in their order, then -1."""
    codes_IL: Tensor
    """As the IDs have them."""
    tokens_IL: Tensor
    """The rows of a model's table for them."""
    sizes: tuple[int, ...]

    @property
    def first_leaf(self) -> int:
        """The number of the first state that is a leaf."""
        return len(self.child_NC)

    @property
    def levels(self) -> int:
        """L."""
        return len(self.sizes)


def build_trie(ids: SemanticIds, device: torch.device) -> Trie:
    """The trie of `ids`. Raises `ValueError` if its table would be larger than `MOST_ENTRIES`.

    States are numbered level by level in the order of their codes: deterministic, and the leaves come
    last.
    """
    codes_IL, C = ids.codes_IL, max(ids.sizes)
    parents_I = np.zeros(ids.num_items, dtype=np.int64)
    edges: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    first, counts = 1, [np.array([ids.num_items])]
    for level in range(ids.levels):
        keys, of_item_I, below = np.unique(
            parents_I * C + codes_IL[:, level], return_inverse=True, return_counts=True
        )
        edges.append((keys // C, keys % C, first + np.arange(len(keys))))
        counts.append(below)
        parents_I = first + of_item_I
        first += len(keys)
    first_leaf = first - len(counts[-1])
    if first_leaf * C > MOST_ENTRIES:
        raise ValueError(
            f"{first_leaf:,} prefixes of semantic IDs times {C} codes are more than the "
            f"{MOST_ENTRIES:,} entries that a dense table may have: use fewer codes a level"
        )
    child_NC = np.full((first_leaf, C), -1, dtype=np.int32)
    for parent, code, state in edges:
        child_NC[parent, code] = state
    leaf_I = parents_I - first_leaf
    order = np.lexsort((ids.ranks_I, leaf_I))
    starts = np.concatenate([[0], np.cumsum(counts[-1])[:-1]])
    place = np.arange(ids.num_items) - starts[leaf_I[order]]
    leaf_items_FR = np.full((len(counts[-1]), counts[-1].max()), -1, dtype=np.int64)
    leaf_items_FR[leaf_I[order], place] = order
    return Trie(
        child_NC=torch.from_numpy(child_NC).to(device),
        items_S=torch.from_numpy(np.concatenate(counts)).to(device, torch.int32),
        leaf_items_FR=torch.from_numpy(leaf_items_FR).to(device),
        codes_IL=torch.from_numpy(codes_IL).to(device),
        tokens_IL=torch.from_numpy(codes_IL + np.array(offsets(ids.sizes))).to(device),
        sizes=ids.sizes,
    )
