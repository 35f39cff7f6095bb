"""Sequence parallelism of a whole model: ranks share the tokens of a micro-batch, as one stream.

Everything that goes row by row needs nothing. Attention asks `SharedRows.attend`, which brings rows and
heads together, has the model's own attention run on what came, and sends the result back: to all rows of
some heads (Ulysses), or to the window's rows of all heads (halo).

Legend: t rows of this rank, T rows of the stream, u rows of the halo, H query heads, K key/value heads,
h and k those of this rank, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.repacking.exchange import Shards, head_map, to_heads, to_rows
from parallel.repacking.halo import Halo, halo_of, with_halo
from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Ints, Layout


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share samples, as one of them sees it."""

    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None: there is none yet, and nothing can travel."""
    sliding_window: str = "exchange"
    """As `parallel.sequence.sliding_window`."""

    def __getstate__(self) -> dict[str, Any]:
        """For data workers, which talk to nobody."""
        return {**self.__dict__, "group": None}


@dataclass(frozen=True)
class Documents:
    """Rows by document, in order."""

    cu_seq_lens: Tensor
    """(documents + 1,) int32 on the device: where each begins, and the number of rows."""
    lengths: list[int]


Attention = Callable[[Tensor, Tensor, Tensor, Documents, Documents], Tensor]
"""Causal attention of queries (., heads, D) to keys and values, each with their documents, which end at
the same row; the heads of both divide. Returns what has the shape of the queries."""


class SharedRows:
    """A micro-batch whose rows `ranks` share, as `layout` says; its samples are documents."""

    def __init__(self, ranks: SequenceRanks, layout: Layout, cu_seq_lens: Tensor) -> None:
        self.shards = Shards(layout, ranks.rank, ranks.group)
        self.documents = Documents(cu_seq_lens, np.diff(layout.offsets).tolist())
        self.by_halo = ranks.sliding_window == "halo"
        self._halos: dict[int, tuple[Halo, Documents, Documents]] = {}

    @torch.compiler.disable
    def attend(
        self, attention: Attention, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, window: int | None
    ) -> Tensor:
        """Attention of this rank's queries, (t, H, D); `window`: rows that a query sees, None: all.

        Every rank of the group calls it for every layer. `attention` knows the window itself.
        """
        if window is not None and self.by_halo:
            return self._with_halo(attention, q_tHD, k_tKD, v_tKD, window)
        H = q_tHD.shape[1]
        q_ThD, k_TkD, v_TkD = to_heads(q_tHD, k_tKD, v_tKD, self.shards)
        if q_ThD.numel():
            heads = head_map(H, k_tKD.shape[1], self.shards.layout.width)
            k_TkD, v_TkD = spread(heads, self.shards.rank, k_TkD, v_TkD)
            q_ThD = attention(q_ThD, k_TkD, v_TkD, self.documents, self.documents)
        return to_rows(q_ThD, H, self.shards)

    def _with_halo(
        self, attention: Attention, q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, window: int
    ) -> Tensor:
        halo, queries, keys = self._halo(window)
        k_uKD, v_uKD = with_halo(k_tKD, v_tKD, halo, self.shards)
        if not q_tHD.numel():  # its peers wait for this rank in the backward pass, too
            return q_tHD + 0 * (k_uKD.sum() + v_uKD.sum())
        return attention(q_tHD, k_uKD, v_uKD, queries, keys)

    def _halo(self, window: int) -> tuple[Halo, Documents, Documents]:
        """Worked out and sent to the device once, for all layers with this window."""
        if window not in self._halos:
            halo, device = (
                halo_of(self.shards.layout, self.shards.rank, window),
                self.documents.cu_seq_lens.device,
            )
            self._halos[window] = (
                halo,
                _documents(halo.queries, device),
                _documents(halo.keys, device),
            )
        return self._halos[window]


def spread(heads: HeadMap, rank: int, *parts_TkD: Tensor) -> tuple[Tensor, ...]:
    """Keys and values with one head for each of the rank's query heads, unless heads divide as they are.

    Not by index: its gradient would add up in no fixed order on a GPU.
    """
    uses = np.bincount(heads.kv_of_q(rank)).tolist()
    if len(set(uses)) == 1:
        return parts_TkD
    return tuple(
        torch.cat([part[:, i : i + 1].expand(-1, n, -1) for i, n in enumerate(uses)], dim=1)
        for part in parts_TkD
    )


def _documents(lengths: Ints, device: torch.device) -> Documents:
    host = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
    host = host.pin_memory() if device.type == "cuda" else host
    return Documents(host.to(device, non_blocking=True), lengths.tolist())
