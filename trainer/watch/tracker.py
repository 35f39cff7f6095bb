"""Weights & Biases beside our own metrics: offline unless asked, and never in training's way."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.watch.config import WandbConfig


class Tracker:
    """A wandb run. Its first error is reported and switches it off; training goes on."""

    def __init__(self, config: WandbConfig, run_dir: Path, run_id: str | None) -> None:
        self.config, self.run_dir = config, run_dir
        self.id = run_id or uuid.uuid4().hex[:8]
        self.mode = mode(config)
        self._run: Any = None

    def open(self, plain: Mapping[str, Any], say: Any) -> None:
        """Start the run with an already redacted configuration; `say` prints a line."""
        self._say = say
        if self.mode != "disabled":
            self._guarded(lambda: self._start(plain))

    def _start(self, plain: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.name or self.run_dir.name,
            id=self.id,
            resume="allow" if self.mode == "online" else None,
            mode="online" if self.mode == "online" else "offline",
            dir=str(self.run_dir),
            config=dict(plain),
            # Its own capture would copy the command line and the environment, secrets included.
            settings=wandb.Settings(
                console="off", x_disable_meta=True, disable_code=True, disable_git=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics."""
        if self._run is not None:
            kind = row["kind"]
            named = {k if k == "step" else f"{kind}/{k}": v for k, v in row.items() if k != "kind"}
            self._guarded(lambda: self._run.log(named))

    def close(self, code: int) -> None:
        """Finish the run."""
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=code))
            self._run = None

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, training matters more
            self._run = None
            self.mode = "disabled"
            self._say(f"wandb is switched off after an error: {type(error).__name__}: {error}")


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
