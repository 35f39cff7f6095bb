"""Sums and casts whose operands keep their places in tensors that come and go: only addresses change.

What a layer sums is the same in every step, but for where the allocator has put its gradients. So the
table that the kernel reads is made once, and only the addresses of whole tensors are filled in later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNKNOWN = 0
"""An address that comes with the call."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of operands."""


@dataclass(frozen=True)
class Table:
    """Rows as in `sums_triton.add_up_rows`, and where their open ends are, as columns of numbers."""

    rows: Any
    tensors: Any
    """Which of the sources, and of the targets, a row is about."""
    begins: Any
    """Elements before the row's part in the source that comes with the call."""
    column: int
    """That source's place among the parts."""
    target_begins: Any | None
    """Elements before the row's sum in the target; None: its address is known."""

    @staticmethod
    def of(
        rows: Sequence[Sequence[int]],
        tensors: Sequence[int],
        begins: Sequence[int],
        column: int,
        target_begins: Sequence[int] | None,
    ) -> "Table":
        """From lists."""
        return Table(
            np.array(rows, np.int64),
            np.array(tensors, np.intp),
            np.array(begins, np.int64),
            column,
            None if target_begins is None else np.array(target_begins, np.int64),
        )

    def add_up(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor] | None,
        dtype: torch.dtype,
        *,
        divide: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """Form the sums, on the device of `sources`; their results have `dtype`."""
        from collectives.tide.sums_triton import add_up_rows  # Triton comes with CUDA builds

        rows = self.rows.copy()
        rows[:, 2 + self.column] = self._addresses(sources, self.begins)
        if targets is not None:
            rows[:, 0] = self._addresses(targets, self.target_begins)
        device = sources[0].device
        add_up_rows(rows, sources[0].dtype, dtype, device, divide=divide, accumulate=accumulate)

    def _addresses(self, tensors: Sequence[Tensor], begins: Any) -> Any:
        bases = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        return bases[self.tensors] + begins * tensors[0].element_size()
