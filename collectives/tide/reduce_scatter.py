"""TIDE reduce-scatter: reads gradients where autograd left them, moves them in their own dtype, and
sums them in fp32 in the order of the ranks.

The shard that a rank keeps is one stream of `S` elements: its part of each tensor, padded to the same
size on every rank, one after the other. The stream is cut into chunks of `C` elements, and chunk `k`
travels through staging buffer `k % DEPTH`:

    for chunk k: write my part for every peer into its staging, signal
                 wait for each peer's part, add all parts in rank order, store, signal "read"

So staging is `DEPTH * (world_size - 1) * C` elements, whatever the size of the layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.symmetric.transport import Transport

DEPTH = 2
"""Staging buffers: one is filled while the other is read."""


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor that belong to one rank's shard and lie in one chunk."""

    tensor: int
    source: int
    """Where they begin in the flattened tensor."""
    target: int
    """Where they begin in the shard's stream."""
    numel: int


def pieces(
    numels: Sequence[int], shard_numels: Sequence[int], rank: int, begin: int, end: int
) -> Iterator[Piece]:
    """The pieces of `rank`'s stream in `[begin, end)`; padding is in none.

    `numels` are the true sizes of the tensors, `shard_numels` the padded ones of their shards.
    """
    start = 0
    for tensor, (numel, shard) in enumerate(zip(numels, shard_numels, strict=True)):
        held = max(min(numel - rank * shard, shard), 0)
        low, high = max(begin, start), min(end, start + held)
        if low < high:
            yield Piece(tensor, rank * shard + low - start, low, high - low)
        start += shard
        if start >= end:
            return


class ReduceScatter:
    """Reduce-scatters over one transport, with staging of constant size."""

    def __init__(self, transport: Transport, chunk: int, first_channel: int) -> None:
        self.transport, self.chunk, self.first_channel = transport, chunk, first_channel
        self.chunks_done = 0
        ranks = range(transport.world_size)
        self.peers = [(transport.rank + k) % len(ranks) for k in ranks if k]
        self.bytes_per_part = chunk * torch.float32.itemsize
        self.sums = torch.empty(chunk)  # for shards that are not fp32 themselves
        self.staging = transport.allocate(max(DEPTH * (len(ranks) - 1), 1) * self.bytes_per_part)

    @property
    def staging_bytes(self) -> int:
        """On each rank."""
        return self.staging.nbytes

    @torch.no_grad()
    def __call__(
        self,
        grads: Sequence[Tensor],
        shard_numels: Sequence[int],
        out: Tensor,
        divide: float,
    ) -> None:
        """Sum `grads` over ranks and store this rank's shard, divided by `divide`, in `out`.

        `grads` have one dtype; `out` holds `sum(shard_numels)` elements, padding set to zero.
        """
        flat = [grad.reshape(-1) for grad in grads]
        numels = [grad.numel() for grad in flat]
        total = sum(shard_numels)
        out.zero_() if any(n % s for n, s in zip(numels, shard_numels, strict=True) if s) else None
        for begin in range(0, total, self.chunk):
            end = min(begin + self.chunk, total)
            self._send(flat, numels, shard_numels, begin, end)
            self._receive(flat, numels, shard_numels, begin, end, out, divide)
            self.chunks_done += 1

    def _send(
        self,
        flat: list[Tensor],
        numels: list[int],
        shard_numels: Sequence[int],
        begin: int,
        end: int,
    ) -> None:
        turn, data, read = self._turn()
        for peer in self.peers:
            self.transport.wait(peer, read, turn - 1)
            place = self._place(self.transport.rank, peer)
            for piece in pieces(numels, shard_numels, peer, begin, end):
                source = flat[piece.tensor][piece.source : piece.source + piece.numel]
                offset = place + (piece.target - begin) * source.element_size()
                self.transport.put(source, self.staging, offset, peer)
            self.transport.signal(peer, data, turn)

    def _receive(
        self,
        flat: list[Tensor],
        numels: list[int],
        shard_numels: Sequence[int],
        begin: int,
        end: int,
        out: Tensor,
        divide: float,
    ) -> None:
        turn, data, read = self._turn()
        rank, dtype = self.transport.rank, flat[0].dtype
        arrived: dict[int, Tensor] = {}
        for peer in self.peers:
            self.transport.wait(peer, data, turn)
            place = self._place(peer, rank)
            arrived[peer] = self.staging.tensor(rank, place, end - begin, dtype)
        for piece in pieces(numels, shard_numels, rank, begin, end):
            own = flat[piece.tensor][piece.source : piece.source + piece.numel]
            at = piece.target - begin
            parts = [
                own if peer == rank else arrived[peer][at : at + piece.numel]
                for peer in range(self.transport.world_size)
            ]
            stored = out[piece.target : piece.target + piece.numel]
            total = stored if out.dtype == torch.float32 else self.sums[: piece.numel]
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
            if divide != 1:
                total.div_(divide)
            if total is not stored:
                stored.copy_(total)
        for peer in self.peers:
            self.transport.signal(peer, read, turn)

    def _turn(self) -> tuple[int, int, int]:
        """How often the present buffer has been used, this time included, and its two channels."""
        buffer = self.chunks_done % DEPTH
        first = self.first_channel + 2 * buffer
        return self.chunks_done // DEPTH + 1, first, first + 1

    def _place(self, source: int, target: int) -> int:
        """Byte offset, in `target`'s staging, of what `source` sends now."""
        order = source - (source > target)  # a rank has no place for what it sends itself
        parts = self.transport.world_size - 1
        return (self.chunks_done % DEPTH * parts + order) * self.bytes_per_part
