"""The halo: keys and values of the rows before a rank's own, as far as a sliding window reaches.

    stream   [ document 4            | document 7               | document 2   ]
    rank 1              [ own rows           ]
    halo         [ W-1 ]                              not beyond the document's first row

Rows stay where they are, so a layer with a window needs no exchange of heads. The rows of one rank's
halo may lie on several ranks, and a rank's rows in several halos; the gradients of these are added up in
the order of the ranks, in fp32 where they are in less.

Legend: t rows of this rank, u rows of its halo, K key/value heads, D head dim, W window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.repacking.exchange import Shards, all_to_all
from parallel.repacking.layout import Ints, Layout
from parallel.repacking.packing import summed_in


@dataclass(frozen=True, eq=False)
class Halo:
    """What one rank sends and receives for a window."""

    sends: Ints
    """(P, 2) which of its own rows each rank gets: from and to."""
    receives: Ints
    """(P,) rows from each rank."""
    queries: Ints
    """Rows of this rank by document."""
    keys: Ints
    """The same with the halo, which belongs to the first document."""

    @property
    def counts(self) -> Ints:
        """(P,) rows to each rank."""
        return self.sends[:, 1] - self.sends[:, 0]


def halo_of(layout: Layout, rank: int, window: int) -> Halo:
    """The halo of `rank`, whose queries see `window` rows of their document, their own included."""
    begins, ends = layout.bounds[:-1], layout.bounds[1:]
    document = np.searchsorted(layout.offsets, begins, side="right") - 1
    reach = np.maximum(layout.offsets[document], begins - (window - 1))
    reach = np.where(ends > begins, reach, begins)  # without rows of its own a rank needs none
    sends = np.stack([np.clip(at, begins[rank], ends[rank]) for at in (reach, begins)], axis=1)
    receives = np.clip(begins[rank], begins, ends) - np.clip(reach[rank], begins, ends)
    table = layout.segments(rank)
    queries = table.end - table.begin
    keys = queries.copy()
    keys[:1] += receives.sum()
    return Halo(sends - begins[rank], receives, queries, keys)


def with_halo(k_tKD: Tensor, v_tKD: Tensor, halo: Halo, shards: Shards) -> tuple[Tensor, Tensor]:
    """Keys and values of the halo, then the rank's own: (u + t, K, D) each; every rank calls it."""
    k_uKD, v_uKD = _WithHalo.apply(shards, halo, k_tKD, v_tKD)
    return k_uKD, v_uKD


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, shards: Shards, halo: Halo, k_tKD: Tensor, v_tKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        context.plan = shards, halo
        _, K, D = k_tKD.shape
        row, counts = 2 * K * D, halo.counts
        sent = k_tKD.new_empty(int(counts.sum()), 2, K, D)
        for (begin, end), block in _blocks(halo, sent):
            block[:, 0], block[:, 1] = k_tKD[begin:end], v_tKD[begin:end]
        arrived = all_to_all(sent.view(-1), counts * row, halo.receives * row, shards.group)
        k_uKD, v_uKD = arrived.view(-1, 2, K, D).unbind(1)
        return torch.cat([k_uKD, k_tKD]), torch.cat([v_uKD, v_tKD])

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Any, ...]:
        shards, halo = context.plan
        u, (K, D) = int(halo.receives.sum()), grad_k.shape[1:]
        row = 2 * K * D
        sent = torch.stack([grad_k[:u], grad_v[:u]], dim=1).view(-1)
        arrived = all_to_all(sent, halo.receives * row, halo.counts * row, shards.group)
        total = torch.stack([grad_k[u:], grad_v[u:]], dim=1).to(summed_in(grad_k.dtype))
        for (begin, end), block in _blocks(halo, arrived.view(-1, 2, K, D)):
            total[begin:end] += block
        return None, None, *total.to(grad_k.dtype).unbind(1)


def _blocks(halo: Halo, rows: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Which own rows each rank gets, and its block of `rows`; only where there are any."""
    blocks = rows.split(halo.counts.tolist())
    for (begin, end), block in zip(halo.sends.tolist(), blocks, strict=True):
        if end > begin:
            yield (begin, end), block
