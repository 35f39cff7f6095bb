"""Stopping on SIGTERM and Ctrl-C: the first asks for a clean stop, the second ends at once.

A signal only leaves a note. The ranks look at their notes together, once per batch (see
`trainer.data`), so all of them leave the loop after the same step and none waits for another.
A file named `stop` in the run folder is the same request from outside: `touch runs/NAME/stop`.

This module must import fast: signals count from the first moment.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LAUNCHER = "SPRINGTIDE_LAUNCHER"
"""Environment variable with the process id of the launcher that started a rank."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: list[int] = []
_asked = False
_file: Path | None = None


def install(on_first: Callable[[], None] | None = None) -> None:
    """Take over SIGTERM and SIGINT in this process; `on_first` runs inside the first signal."""

    def handle(number: int, _frame: FrameType | None) -> None:
        _received.append(number)
        if len(_received) > 1:
            os.write(2, b"stopped at once, without saving\n")
            os._exit(1)
        if on_first is not None:
            on_first()

    for number in SIGNALS:
        signal.signal(number, handle)


def ignore() -> None:
    """Ignore further signals: for background workers, and while a rank says goodbye."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def watch_file(path: Path) -> None:
    """Treat the existence of `path` as a request to stop, too."""
    global _file
    _file = path


def ask() -> None:
    """Have this process stop as if it had been asked to from outside."""
    global _asked
    _asked = True


def requested() -> bool:
    """Whether this process has been asked to stop."""
    return bool(_received) or _asked or (_file is not None and _file.exists())


def die_with_parent(parent: int | None) -> None:
    """On Linux: have the kernel kill this process when its parent is gone, however it went.

    `parent` is the process that started this one, and may have gone before; None: that is not known.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)
