"""Weights & Biases beside our own metrics: offline unless asked, and never in training's way.

A resumed run goes on without a gap and without doing a step twice. A row's `_step` at wandb follows
from its step alone (`wandb_step`), so the number that a run has come to says which rows it has:

- online, rows that it has are not sent again, and rows that a kill has kept from it are sent now;
- offline, the run is written anew from the rows of `metrics.jsonl` that stay: the newest
  `wandb/offline-run-*` is all there is to sync, those before it are put aside in `wandb/superseded/`.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.watch.config import WandbConfig
from trainer.watch.page import panel_page

Row = Mapping[str, Any]
KINDS = ("train", "eval")
"""Rows that trackers get."""
PATIENCE = 30.0
"""Seconds that wandb's server may take to answer before the run goes on offline."""


class Tracker:
    """A wandb run."""

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        run_id: str | None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.run_dir, self._say = config, run_dir, say
        self.id = run_id or uuid.uuid4().hex[:8]
        self.mode = mode(config)
        self.panels: Sequence[Any] = ()
        """What the task adds to the report: beside each evaluation from now on."""
        self._run: Any = None
        self._has = 0

    def open(self, plain: Mapping[str, Any], step: int, kept: list[Row]) -> None:
        """Start after `step` with an already redacted configuration and the rows so far."""
        if self.mode == "disabled":
            return
        self._put_aside()
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        try:
            self._run = self._start(wandb, plain)
        except wandb.Error as error:
            if self.mode != "online":
                raise
            self.mode = "offline"
            self._say(f"wandb is offline: it cannot be reached ({_first_line(error)})")
            wandb.teardown()  # its service would say that the run's id is in use
            self._run = self._start(wandb, plain)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._has = self._run.starting_step
        for row in kept:
            self.log(row)

    def _start(self, wandb: Any, plain: Mapping[str, Any]) -> Any:
        return wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.name or self.run_dir.name,
            id=self.id,
            resume="allow" if self.mode == "online" else None,
            mode=self.mode,
            dir=str(self.run_dir),
            config=dict(plain),
            # Its own capture would copy the command line and the environment, secrets included.
            settings=wandb.Settings(
                console="off", x_disable_meta=True, disable_code=True, disable_git=True,
                init_timeout=PATIENCE,
            ),
        )  # fmt: skip

    def _put_aside(self) -> None:
        """Earlier offline runs, whose rows that stay are written again."""
        aside = self.run_dir / "wandb" / "superseded"
        for old in sorted((self.run_dir / "wandb").glob("offline-run-*")):
            aside.mkdir(exist_ok=True)
            old.rename(aside / old.name)

    def log(self, row: Row) -> None:
        """Add a row about a step, unless the run has it."""
        if self._run is None or row["kind"] not in KINDS:
            return
        if wandb_step(row) < self._has:
            return
        figures = named(row)
        if self.panels and row["kind"] == "eval":
            import wandb

            figures["eval/panels"] = wandb.Html(panel_page(self.panels), inject=False)
        self._run.log(figures, step=wandb_step(row))

    def close(self, code: int) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None


def wandb_step(row: Row) -> int:
    """The row's place at wandb: a step's train row, then its evaluation."""
    return 2 * int(row["step"]) + KINDS.index(row["kind"])


def named(row: Row) -> dict[str, Any]:
    """A row's figures as trackers call them: `train/loss`, and `step`."""
    kind = row["kind"]
    return {k if k == "step" else f"{kind}/{k}": v for k, v in row.items() if k != "kind"}


def mode(config: WandbConfig) -> str:
    """The mode that will be used: online only if asked and if there is a key to do it with."""
    if config.mode == "online" and not has_key():
        return "offline"
    return "offline" if config.mode == "auto" else config.mode


def has_key() -> bool:
    """Whether wandb can log in without asking anybody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
