"""One reduce-scatter's work: whose gradients, cut how, summed where to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives.symmetric.transport import Put
from collectives.tide.layout import Cut, Piece, pieces


@dataclass
class Reduction:
    """What one call works on."""

    grads: list[Tensor]
    """Flat; emptied once they have been read."""
    cuts: Sequence[Cut]
    targets: Sequence[Tensor]
    """This rank's part of each, flat and without padding."""
    world_size: int
    divide: float
    accumulate: bool
    tenant: str
    dtype: torch.dtype = field(init=False)
    """Of the gradients."""
    numel: int = field(init=False)
    """Of the stream."""

    def __post_init__(self) -> None:
        self.dtype = self.grads[0].dtype
        self.numel = sum(c.shard_numel for c in self.cuts)
        self._starts = [0]
        for c in self.cuts:
            self._starts.append(self._starts[-1] + c.shard_numel)

    def pieces(self, rank: int, begin: int, end: int) -> Iterator[Piece]:
        """The pieces of `rank`'s stream in `[begin, end)`."""
        return pieces(self.cuts, self.world_size, rank, begin, end)

    def put(self, piece: Piece, peer: int, offset: int) -> Put:
        """Of what this rank contributes to a piece, to `peer`, whose stream begins at `offset`."""
        size = self.dtype.itemsize
        width = piece.width * size
        begin, target = piece.source * size, offset + piece.target * size
        step = piece.pitch * size if piece.rows > 1 else width
        return Put(piece.tensor, begin, piece.rows, width, step, peer, target, width)

    def gradient(self, piece: Piece) -> Tensor:
        """What this rank contributes to a piece, as (rows, width)."""
        return piece.of(self.grads[piece.tensor])

    def target(self, piece: Piece) -> Tensor:
        """Where the sum of a piece of this rank's shard goes."""
        begin = self.target_begin(piece)
        return self.targets[piece.tensor][begin : begin + piece.numel]

    def target_begin(self, piece: Piece) -> int:
        """Elements before a piece in its target."""
        return piece.target - self._starts[piece.tensor]
