"""Steps whose loss or gradient is not finite are skipped on all ranks, counted, and limited.

The decision is a number on the device that the fused optimizer reads itself (the mechanism of
gradient scaling), so that no step waits for the host. The host looks when it reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.errors import NonFiniteError


@dataclass
class Guard:
    """Counts skipped steps; `limit` of them in a row end the run."""

    limit: int
    skipped: int = 0
    in_a_row: int = 0
    _unread: list[tuple[int, Callable[[], Sequence[int]], Tensor]] = field(default_factory=list)

    def skip_unless_finite(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Tensor,
        norm: Tensor,
        step: int,
        samples: Callable[[], Sequence[int]],
    ) -> None:
        """Make the next `optimizer.step()` do nothing if `loss` or `norm` is not finite.

        Both must be the same on every rank. `samples` tells which samples the batch has, over all
        ranks: any of them may be the cause.
        """
        bad = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        self._unread.append((step, samples, bad))

    def read(self) -> None:
        """Wait for the steps so far and count. Raises `NonFiniteError` at the limit."""
        if not self._unread:
            return
        flags = torch.stack([bad for _, _, bad in self._unread]).tolist()
        for (step, samples, _), bad in zip(self._unread, flags, strict=True):
            self.in_a_row = self.in_a_row + 1 if bad else 0
            self.skipped += bool(bad)
            if bad and self.in_a_row >= self.limit:
                raise NonFiniteError(
                    f"the loss or gradient was not finite {self.in_a_row} steps in a row, last at "
                    f"step {step} (samples {describe(samples())}): lower optim.lr, look at these "
                    "samples, or raise trainer.nonfinite_limit"
                )
        self._unread.clear()


def describe(samples: Sequence[int]) -> str:
    """The identity of a batch, short."""
    shown = ", ".join(str(sample) for sample in samples[:8])
    return shown + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
