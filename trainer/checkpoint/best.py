"""Which checkpoint is the best: `checkpoint.highest` and `checkpoint.lowest` name a figure to go by.

An evaluation that is better than all before it has its step saved. What is best is part of a
checkpoint's progress: a resumed run knows it as the run before did, and the newest checkpoint says it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from collectives.host import broadcast
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.folder import Checkpoints
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    figure: str
    highest: bool
    """Whether more of it is better."""
    step: int
    value: float

    def entry(self) -> dict[str, Any]:
        """As a checkpoint's progress has it."""
        return asdict(self)


def better(
    config: CheckpointConfig, best: Best | None, step: int, figures: Mapping[str, float]
) -> Best | None:
    """The evaluation of `step`, if it is better than `best`; one that is not finite never is.

    Raises `ConfigError` if the evaluation lacks the figure that is to decide.
    """
    figure, highest = config.best_by, config.highest is not None
    if figure is None:
        return None
    if figure not in figures:
        key = "checkpoint.highest" if highest else "checkpoint.lowest"
        raise ConfigError(
            f"{key}={figure}, but evaluations of this run have "
            + (f"{', '.join(sorted(figures))}: set {key} to one of them" if figures else
               f"no figures: set {key}=null")
        )  # fmt: skip
    value = float(figures[figure])
    beaten = best is None or (value > best.value if highest else value < best.value)
    return Best(figure, highest, step, value) if beaten and math.isfinite(value) else None


def agree_if_better(
    config: CheckpointConfig, best: Best | None, step: int, figures: Mapping[str, float]
) -> Best | None:
    """The same on all ranks: rank 0 decides, since figures may also be about a rank's own part."""
    try:
        found, problem = better(config, best, step, figures), None
    except ConfigError as error:
        found, problem = None, error
    found, problem = broadcast((found, problem))
    if problem is not None:
        raise problem
    return found


def known_best(
    config: CheckpointConfig, progress: Mapping[str, Any], checkpoints: Checkpoints
) -> Best | None:
    """What a checkpoint's progress says is the best, on all ranks.

    None if it goes by another figure than `config`, or is not in this run's folder.
    """
    best = Best(**progress["best"]) if progress.get("best") else None
    if best is None or (best.figure, best.highest) != (config.best_by, config.highest is not None):
        return None
    here: bool = broadcast(checkpoints.has(best.step))
    return best if here else None
