"""Whether a failed run is started again, and from where: `launch.max_restarts`.

| exit code | what happens |
|---|---|
| failed: a rank was killed, raised, fell silent | again, from the newest checkpoint |
| checkpoint, and the newest one is damaged | that one is put aside; again, from the one before it |
| anything else | the run ends: it would fail in the same way again |

Failures without a new checkpoint in between are counted, so that a run of weeks survives any number of
them, and one that always fails at the same step ends soon.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.folder import Checkpoints
from trainer.errors import CHECKPOINT, FAILED
from trainer.verify import problem


@dataclass(frozen=True)
class Again:
    """The next attempt."""

    said: str
    """A line for whoever watches."""
    resume: str | None
    """What `trainer.resume` has to be; None: what it was."""


class Restarts:
    """The restarts of one run; `limit` of them in a row without progress."""

    def __init__(self, limit: int, checkpoints: Path) -> None:
        self._limit, self._checkpoints = limit, Checkpoints(checkpoints)
        self._seen = self._checkpoints.newest()
        self._used = 0

    def after(self, code: int) -> Again | None:
        """What follows an attempt that ended with `code`; None: nothing."""
        newest = self._checkpoints.newest()
        if newest != self._seen:
            self._used = 0
        if code not in (FAILED, CHECKPOINT) or self._used == self._limit:
            return None
        notes = ""
        if code == CHECKPOINT:
            if newest is None or problem(newest) is None:
                return None  # it could not be written: a full disk stays full
            aside = self._checkpoints.put_aside(newest, "damaged")
            notes, newest = f"; what was damaged is now {aside.name}", self._checkpoints.newest()
        self._seen, self._used = newest, self._used + 1
        place = f"from {newest.name}" if newest is not None else "from the beginning"
        said = f"starting again {place} (restart {self._used} of {self._limit}){notes}"
        return Again(said, "auto" if newest is not None else None)
