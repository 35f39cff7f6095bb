"""Does a run go on where its checkpoint stood, or would it silently become another run?

The position in the data is a number of samples, which means the same on any number of ranks and with
any batch size, but only in the same data and in the order of the same seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import CheckpointError


@dataclass(frozen=True)
class DataIdentity:
    """What decides which sample has which number."""

    seed: int
    fingerprint: str
    """Of the training samples, see `trainer.data.fingerprint`."""

    def entries(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"seed": self.seed, "data": self.fingerprint}


def goes_on(progress: Mapping[str, Any], here: DataIdentity, change_data: bool) -> bool:
    """Whether the position of `progress` counts; if not, the run begins its data at the start.

    Raises `CheckpointError` for other data, or another seed, that nobody asked for.
    """
    differing = [
        f"trainer.seed={progress['seed']}, and here it is {here.seed}"
        if name == "seed"
        else "other data (or the same, cut into other samples)"
        for name, value in here.entries().items()
        if progress[name] != value
    ]
    if not differing:
        return True
    if change_data:
        return False
    raise CheckpointError(
        f"the checkpoint of step {progress['step']} was trained on {differing[0]}, so its position in "
        "the data means nothing here: set what it was, or trainer.change_data=true to go on with "
        "these weights from the beginning of this data"
    )


def check_epochs(progress: Mapping[str, Any], batch_size: int, epochs: int | None) -> None:
    """Raise `CheckpointError` if steps follow from epochs and were counted in other batches."""
    if epochs is not None and progress["batch_size"] != batch_size:
        raise CheckpointError(
            f"trainer.batch_size={batch_size}, but the checkpoint of step {progress['step']} counted "
            f"steps in batches of {progress['batch_size']}, and with trainer.epochs the number of steps "
            f"follows from it: set trainer.batch_size={progress['batch_size']}, or trainer.epochs=null "
            "and trainer.steps"
        )
