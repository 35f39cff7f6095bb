"""Where shards lie: in a gathered tensor, in a slot, and in the stream of a reduce-scatter.

A tensor that is cut along one dimension over N ranks is `rows` rows of N parts of `width` elements:
rows are the dimensions before the cut one, so along the first dimension there is one row and a rank's
part is contiguous; otherwise it is a column of blocks.

    Shard(0)   [ r0 r0 r0 | r1 r1 r1 ]            Shard(1)   [ r0 | r1 ]
                                                             [ r0 | r1 ]
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.symmetric.transport import Region

ALIGNMENT = 256
"""Bytes; tensors begin at multiples, which is what copy engines and vector loads like."""


@dataclass(frozen=True)
class Cut:
    """A tensor cut into equal parts; with one row, the last parts may lack elements."""

    rows: int
    width: int
    """Elements of one rank's part of a row, padded."""
    numel: int
    """Of the whole tensor, without padding."""

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part, padded."""
        return self.rows * self.width

    def held(self, rank: int) -> int:
        """Elements of `rank`'s part, without padding."""
        if self.rows != 1:
            return self.shard_numel
        return max(min(self.numel - rank * self.width, self.width), 0)


def cut(shape: Sequence[int], dim: int, world_size: int) -> Cut:
    """Cut a tensor of `shape` along `dim`, which only along dimension 0 may leave a remainder."""
    inner = math.prod(shape[dim + 1 :])
    if dim and shape[dim] % world_size:
        raise ValueError(f"dimension {dim} of {tuple(shape)} cannot be cut evenly by {world_size}")
    return Cut(math.prod(shape[:dim]), -(-shape[dim] // world_size) * inner, math.prod(shape))


@dataclass(frozen=True)
class Block:
    """Rows of elements in a region."""

    offset: int
    """Bytes."""
    rows: int
    width: int
    pitch: int
    """Elements from one row to the next."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return self.rows * self.width * self.dtype.itemsize

    def after(self, begin: int) -> "Block":
        """What is left of a single row without its first `begin` elements."""
        width = self.width - begin
        return Block(self.offset + begin * self.dtype.itemsize, 1, width, width, self.dtype)

    def view(self, region: Region, rank: int) -> Tensor:
        """The elements in `rank`'s part of `region`, as (rows, width), on a storage of their own."""
        if not self.rows * self.width:
            return torch.empty(self.rows, self.width, dtype=self.dtype)
        span = (self.rows - 1) * self.pitch + self.width
        flat = region.tensor(rank, self.offset, span, self.dtype)
        return flat.as_strided((self.rows, self.width), (self.pitch, 1))

    def split(self, nbytes: int) -> Iterator["Block"]:
        """Parts of at most `nbytes` bytes each, in order, and at least one element."""
        size = self.dtype.itemsize
        most = max(nbytes // size, 1)
        if self.rows != 1:
            height = max(most // max(self.width, 1), 1)
            for row in range(0, self.rows, height):
                rows = min(height, self.rows - row)
                offset = self.offset + row * self.pitch * size
                yield Block(offset, rows, self.width, self.pitch, self.dtype)
            return
        for begin in range(0, self.width, most):
            width = min(most, self.width - begin)
            yield Block(self.offset + begin * size, 1, width, width, self.dtype)


@dataclass(frozen=True)
class Layout:
    """Where the gathered tensors of a layer lie in a slot: the gathered bytes are the parameters."""

    world_size: int
    cuts: tuple[Cut, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    """Of the tensors, in bytes."""
    nbytes: int

    def blocks(self, rank: int) -> list[Block]:
        """Where `rank`'s shard of each tensor goes."""
        return [
            Block(
                offset + rank * c.width * dtype.itemsize, c.rows, c.width,
                self.world_size * c.width, dtype,
            )
            for c, dtype, offset in zip(self.cuts, self.dtypes, self.offsets, strict=True)
        ]  # fmt: skip

    def tensors(self, region: Region, rank: int) -> list[Tensor]:
        """`rank`'s gathered tensors, padded, each 1-D with a storage of its own."""
        return [
            region.tensor(rank, offset, c.shard_numel * self.world_size, dtype)
            for c, dtype, offset in zip(self.cuts, self.dtypes, self.offsets, strict=True)
        ]


def make_layout(world_size: int, cuts: Sequence[tuple[Cut, torch.dtype]]) -> Layout:
    """Place tensors, given how each is cut and its dtype, in their order."""
    offsets, end = [], 0
    for c, dtype in cuts:
        offsets.append(end)
        end += -(-c.shard_numel * world_size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    each, dtypes = zip(*cuts, strict=True)
    return Layout(world_size, each, dtypes, tuple(offsets), max(end, ALIGNMENT))


@dataclass(frozen=True)
class Part:
    """A block of a rank's shard, or a run of one."""

    tensor: int
    begin: int
    """Elements of the shard that come before it."""
    block: Block


def portions(blocks: Sequence[Block], shares: Sequence[int]) -> list[list[Part]]:
    """A rank's blocks, of all tensors, in order, as portions whose sizes are about in these shares.

    Rows that lie apart stay together, so a portion may be empty.
    """
    whole = sum(b.nbytes for b in blocks)
    found: list[list[Part]] = [[] for _ in shares]
    number, room = 0, whole * shares[0] // sum(shares)
    for tensor, block in enumerate(blocks):
        begin = 0
        while begin < block.rows * block.width:
            while room <= 0 and number < len(shares) - 1:
                number += 1
                room += whole * shares[number] // sum(shares)
            part = block.after(begin) if begin else block
            if number < len(shares) - 1 and block.rows == 1:
                part = next(part.split(-(-room // ALIGNMENT) * ALIGNMENT))
            found[number].append(Part(tensor, begin, part))
            begin += part.rows * part.width
            room -= part.nbytes
    return found


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor that belong to one rank's shard and lie in one part of its stream.

    The stream of a rank is its parts of all tensors, padded, one after the other.
    """

    tensor: int
    source: int
    """Where they begin in the flattened tensor."""
    rows: int
    width: int
    pitch: int
    """Elements from one row to the next in the tensor."""
    target: int
    """Where they begin in the stream, in which they are contiguous."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.width

    def of(self, flat: Tensor) -> Tensor:
        """The piece of its flattened tensor, as (rows, width)."""
        begin = flat.storage_offset() + self.source
        return flat.as_strided((self.rows, self.width), (self.pitch, 1), begin)


def pieces(
    cuts: Sequence[Cut], world_size: int, rank: int, begin: int, end: int
) -> Iterator[Piece]:
    """The pieces of `rank`'s stream in `[begin, end)`, in order; padding is in none."""
    start = 0
    for tensor, c in enumerate(cuts):
        low, high = max(begin, start), min(end, start + c.held(rank))
        while low < high:
            row, column = divmod(low - start, c.width)
            pitch = world_size * c.width
            if column or high - low < c.width:  # a part of a row
                rows, width = 1, min(c.width - column, high - low)
            else:
                rows, width = (high - low) // c.width, c.width
            yield Piece(tensor, row * pitch + rank * c.width + column, rows, width, pitch, low)
            low += rows * width
        start += c.shard_numel
        if start >= end:
            return
