"""Exit codes, and the errors that end a run with one of them and a message instead of a traceback.

| code | meaning |
|---|---|
| 0 | done |
| 1 | any other failure; the failing rank's traceback is shown |
| 2 | configuration |
| 3 | data |
| 4 | checkpoint, or the run folder cannot be written |
| 5 | too many steps with a loss or gradient that was not finite |
| 75 | stopped by a signal, saved; the last line says how to resume |
"""

DONE, FAILED, CONFIG, DATA, CHECKPOINT, NON_FINITE, STOPPED = 0, 1, 2, 3, 4, 5, 75


class RunError(Exception):
    """An error that a user can act on: what was given, what is allowed, which key to set."""

    code = FAILED


class ConfigError(RunError):
    """The configuration cannot be used."""

    code = CONFIG


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""

    code = CHECKPOINT


class NonFiniteError(RunError):
    """Too many steps had to be skipped."""

    code = NON_FINITE
