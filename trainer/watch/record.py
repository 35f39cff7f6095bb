"""What rank 0 writes about a run: `metrics.jsonl`, and everything that is made from its rows."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.watch.config import LoggingConfig
from trainer.watch.metrics import Metrics
from trainer.watch.page import PANELS, write_page
from trainer.watch.tensorboard import TensorBoard
from trainer.watch.tracker import Row, Tracker


class View(Protocol):
    """Something that shows the rows; training goes on without it if it breaks."""

    def open(self, plain: Mapping[str, Any], step: int, kept: list[Row]) -> None:
        """Begin after `step`, with a redacted configuration and the rows so far that stay."""
        ...

    def log(self, row: Row) -> None:
        """A row has been written."""
        ...

    def close(self, code: int) -> None:
        """The run ends with this exit code."""
        ...


class Page:
    """`report.html`: anew when something was evaluated or saved, if that is cheap, and at the end."""

    SHARE = 0.01
    """Of the run's time, at most, for pages that are not the last."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._next = 0.0

    def open(self, plain: Mapping[str, Any], step: int, kept: list[Row]) -> None:
        """See `View`."""

    def log(self, row: Row) -> None:
        """See `View`."""
        if row["kind"] in ("eval", "save") and time.monotonic() >= self._next:
            begin = time.monotonic()
            write_page([self.run_dir], self.run_dir / "report.html")
            self._next = time.monotonic() + (time.monotonic() - begin) / self.SHARE

    def close(self, code: int) -> None:
        """See `View`."""
        write_page([self.run_dir], self.run_dir / "report.html")


class Record:
    """All files of a run's figures. A view's first error is said and switches it off."""

    def __init__(
        self, config: LoggingConfig, run_dir: Path, say: Callable[[str], None], run_id: str | None
    ) -> None:
        self.run_dir, self._say = run_dir, say
        self.tracker = Tracker(config.wandb, run_dir, run_id, say)
        self._panels_work = True
        self._metrics = Metrics(run_dir / "metrics.jsonl")
        self._views: dict[str, View] = {"wandb": self.tracker}
        if config.tensorboard:
            self._views["TensorBoard"] = TensorBoard(run_dir)
        self._views["report.html"] = Page(run_dir)

    def open(self, plain: Mapping[str, Any], step: int) -> list[Row]:
        """Begin after `step`; returns the rows so far that stay."""
        kept: list[Row] = list(self._metrics.open(step))
        self._each(lambda view: view.open(plain, step, kept))
        return kept

    def write(self, row: Row) -> None:
        """Add a row. `time` is put to it: seconds since 1970."""
        timed = {**row, "time": time.time()}
        self._metrics.write(timed)
        self._each(lambda view: view.log(timed))

    def panels(self, panels: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Keep what the task adds to the report; it replaces what it added before."""
        temporary = self.run_dir / f".{PANELS}"
        if not self._panels_work:
            return
        try:
            found = list(panels())
            temporary.write_text(json.dumps(found, default=str))
            os.replace(temporary, self.run_dir / PANELS)
            self.tracker.panels = found
        except Exception as error:  # the task's own; training matters more
            self._panels_work = False
            self._say(f"the task's panels are left out: {type(error).__name__}: {error}")

    def close(self, code: int, page: bool = True) -> None:
        """No more rows; without `page`, somebody else writes it."""
        self._metrics.close()
        if not page:
            self._views.pop("report.html", None)
        self._each(lambda view: view.close(code))
        self._views.clear()

    def _each(self, action: Callable[[View], None]) -> None:
        for name, view in list(self._views.items()):
            try:
                action(view)
            except Exception as error:  # whatever it is, training matters more
                del self._views[name]
                self._say(f"{name} is switched off after an error: {type(error).__name__}: {error}")
