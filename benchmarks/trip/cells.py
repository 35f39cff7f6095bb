"""What is kept of every model and seed: scores and figures, in a file that a resumed study reads."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.trip.training import Plan, Trained
from recipes.ctr.metrics import Floats
from recipes.trip import TripTask
from trainer.config import Config

LATER = ("behaviours", "verdict", "item_feature_keys", "read", "reconstruction_rows")
"""Fields that came later: left out while at their defaults, so that older cells are found."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    logits_T: Floats
    """Of the test targets; in half precision. None where a learning rate was tried."""
    about: dict[str, Any]
    """Plain data: lr, best, epoch, parameters, losses, seconds, device."""


def key(task: TripTask, config: Config, plan: Plan, lr: float, seed: int) -> str:
    """Everything that a training depends on but the code, the machine, and where files are."""
    data = {n: v for n, v in _fields(config.data).items() if n not in ("cache_dir", "folder")}
    prints = [clicks.fingerprint() for clicks in (task.train_samples(), task.evaluated)]
    optim = {**asdict(config.optim), "lr": lr}
    return json.dumps(
        [_fields(config.model), data, optim, asdict(plan), seed, prints], sort_keys=True
    )


def _fields(config: Any) -> dict[str, Any]:
    """As plain data."""
    old = asdict(type(config)())
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in LATER or value != old[name]
    }


def path(folder: Path, model: str, key: str) -> Path:
    """Named after the model, for people, and the key; if it is there under another name, that one."""
    slug = "".join(c if c.isalnum() or c in "._=-" else "-" for c in model)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    found = sorted(folder.glob(f"*-{digest}.safetensors"))
    return found[0] if found else folder / f"{slug}-{digest}.safetensors"


def write(file: Path, key: str, trained: Trained, about: dict[str, Any]) -> None:
    """Whole or not at all."""
    about |= {
        "best": trained.best,
        "epoch": trained.epoch,
        "parameters": trained.parameters,
        "losses": trained.losses,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    logits = trained.logits_T.astype(np.float16)
    save_file({"logits": logits}, temporary, {"key": key, "about": json.dumps(about)})
    temporary.replace(file)


def read(file: Path, key: str) -> Cell | None:
    """The cell, or None if it is not there. One that belongs to another key is not there."""
    if not file.exists():
        return None
    with safe_open(file, "numpy") as stored:
        about, logits = stored.metadata(), stored.get_tensor("logits")
    if about["key"] != key:
        return None
    return Cell(logits.astype(np.float64), json.loads(about["about"]))
