"""Documents end to end: where each begins, known on the host and on the device.

Legend: T rows of all documents, n documents, N blocks of all documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The documents cut into blocks of equal length; a document's last block may be shorter."""

    begin_N: Tensor
    """First row of each block."""
    block_T: Tensor
    """Which block a row is in, counted over all documents."""
    first_T: Tensor
    """The first block of the row's document, counted likewise."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Which rows belong together."""

    lengths: tuple[int, ...]
    """Rows of each document, on the host: kernels are told them, and nothing waits for the device."""
    cu_seq_lens: Tensor
    """(n + 1,) int32 on the device: where each begins, and T."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "Documents":
        """Documents of these lengths."""
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(tuple(int(length) for length in lengths), offsets)

    @property
    def longest(self) -> int:
        """Rows of the longest."""
        return max(self.lengths, default=0)

    @property
    def num_rows(self) -> int:
        """T."""
        return sum(self.lengths)

    def num_blocks(self, block: int) -> int:
        """N."""
        return sum(-(-length // block) for length in self.lengths)

    def positions(self) -> Tensor:
        """(T,) int64: each row's place in its document."""
        row_T = torch.arange(self.num_rows, device=self.cu_seq_lens.device)
        return row_T - self.cu_seq_lens.long()[self._document_of(row_T)]

    def blocks(self, block: int) -> Blocks:
        """Cut each document into blocks of `block` rows, counted from its beginning."""
        offsets = self.cu_seq_lens.long()
        row_T = torch.arange(self.num_rows, device=offsets.device)
        block_N = torch.arange(self.num_blocks(block), device=offsets.device)
        ends_n = ((offsets.diff() + block - 1) // block).cumsum(0)
        first_n = ends_n - (offsets.diff() + block - 1) // block
        of_T = self._document_of(row_T)
        of_N = torch.searchsorted(ends_n, block_N, right=True)
        begin_N = offsets[of_N] + (block_N - first_n[of_N]) * block
        return Blocks(
            begin_N=begin_N,
            block_T=first_n[of_T] + (row_T - offsets[of_T]) // block,
            first_T=first_n[of_T],
        )

    def cut(self, block: int) -> "Documents":
        """The blocks, as documents of their own."""
        lengths = [
            min(block, length - begin)
            for length in self.lengths
            for begin in range(0, length, block)
        ]
        bounds = torch.cat([self.blocks(block).begin_N.int(), self.cu_seq_lens[-1:]])
        return Documents(tuple(lengths), bounds)

    def _document_of(self, row: Tensor) -> Tensor:
        return torch.searchsorted(self.cu_seq_lens[1:].long(), row, right=True)
