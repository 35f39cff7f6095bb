"""TensorBoard beside our own metrics, where it is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.watch.tracker import KINDS, Row, named


class TensorBoard:
    """Event files in the run folder; a resumed run writes them anew, from the rows that stay."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "tensorboard"
        self._writer: Any = None

    def open(self, plain: Mapping[str, Any], step: int, kept: list[Row]) -> None:
        """Begin with the rows so far; what a kill has kept from the files is among them."""
        from torch.utils.tensorboard import SummaryWriter

        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(self.folder))
        for row in kept:
            self.log(row)

    def log(self, row: Row) -> None:
        """Add the numbers of a row about a step."""
        for name, value in named(row).items() if row["kind"] in KINDS else ():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self, code: int) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
