"""The valid semantic IDs as tables on the device, so that no step of a decoder needs the host.

I items, L levels, S states (the root is 0, the leaves are the last F), N inner states, C codes of the
largest level, R items of the fullest leaf, E edges from a state to the next, X of the fullest state

From state and code to the next state there is a dense table, as long as it is small, or else the sorted
numbers `state * C + code` of all edges: states are numbered so that the edge at place e leads to e + 1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.slide.ids import SemanticIds
from models.slide.model import offsets

MOST_ENTRIES = 64 * 2**20
"""Of a dense table; 256 MiB."""


@dataclass(frozen=True)
class Trie:
    """All tables are on one device."""

    child_NC: Tensor | None
    """The state that a code leads to, or -1; None: look among the edges."""
    edges_E: Tensor
    """State times C plus code, ascending."""
    widest: int
    """X."""
    first_leaf: int
    """The number of the first state that is a leaf: N."""
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
    def levels(self) -> int:
        """L."""
        return len(self.sizes)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.edges_E.device

    def children(self, state_BW: Tensor) -> Tensor:
        """Where each code leads from these states, or -1: (B, W, C)."""
        if self.child_NC is not None:
            return self.child_NC[state_BW].long()
        C = max(self.sizes)
        begin_BW1 = torch.searchsorted(self.edges_E, state_BW * C)[..., None]
        edge_BWX = begin_BW1 + torch.arange(self.widest, device=self.device)
        key_BWX = self.edges_E[edge_BWX.clamp(max=len(self.edges_E) - 1)]
        own_BWX = (key_BWX // C == state_BW[..., None]) & (edge_BWX < len(self.edges_E))
        child_BWC = torch.full((*state_BW.shape, C + 1), -1, device=self.device)
        code_BWX = torch.where(
            own_BWX, key_BWX % C, C
        )  # what is another state's goes to a place of its own
        return child_BWC.scatter_(2, code_BWX, edge_BWX + 1)[..., :C]

    def child(self, state_BW: Tensor, code_BW: Tensor) -> Tensor:
        """Where a code leads from each state, or -1: (B, W)."""
        if self.child_NC is not None:
            return self.child_NC[state_BW, code_BW].long()
        key_BW = state_BW * max(self.sizes) + code_BW
        edge_BW = torch.searchsorted(self.edges_E, key_BW)
        found_BW = self.edges_E[edge_BW.clamp(max=len(self.edges_E) - 1)] == key_BW
        return torch.where(found_BW, edge_BW + 1, -1)


def build_trie(ids: SemanticIds, device: torch.device) -> Trie:
    """The trie of `ids`, with a dense table if that has at most `MOST_ENTRIES`.

    States are numbered level by level in the order of their codes: deterministic, and the leaves come
    last.
    """
    codes_IL, C = ids.codes_IL, max(ids.sizes)
    parents_I = np.zeros(ids.num_items, dtype=np.int64)
    edges: list[tuple[np.ndarray, int]] = []
    first, counts = 1, [np.array([ids.num_items])]
    for level in range(ids.levels):
        keys, of_item_I, below = np.unique(
            parents_I * C + codes_IL[:, level], return_inverse=True, return_counts=True
        )
        edges.append((keys, int(np.bincount(keys // C).max())))
        counts.append(below)
        parents_I = first + of_item_I
        first += len(keys)
    first_leaf = first - len(counts[-1])
    edges_E = np.concatenate([keys for keys, _ in edges])
    child_NC = None
    if first_leaf * C <= MOST_ENTRIES:
        child_NC = np.full((first_leaf, C), -1, dtype=np.int32)
        child_NC[edges_E // C, edges_E % C] = 1 + np.arange(len(edges_E))
    leaf_I = parents_I - first_leaf
    order = np.lexsort((ids.ranks_I, leaf_I))
    starts = np.concatenate([[0], np.cumsum(counts[-1])[:-1]])
    place = np.arange(ids.num_items) - starts[leaf_I[order]]
    leaf_items_FR = np.full((len(counts[-1]), counts[-1].max()), -1, dtype=np.int64)
    leaf_items_FR[leaf_I[order], place] = order
    return Trie(
        child_NC=None if child_NC is None else torch.from_numpy(child_NC).to(device),
        edges_E=torch.from_numpy(edges_E).to(device),
        widest=max(most for _, most in edges),
        first_leaf=first_leaf,
        items_S=torch.from_numpy(np.concatenate(counts)).to(device, torch.int32),
        leaf_items_FR=torch.from_numpy(leaf_items_FR).to(device),
        codes_IL=torch.from_numpy(codes_IL).to(device),
        tokens_IL=torch.from_numpy(codes_IL + np.array(offsets(ids.sizes))).to(device),
        sizes=ids.sizes,
    )
