"""Noticing that a rank of this machine is gone, even while this one waits in a collective for it.

When a rank dies, the launcher sends SIGTERM to the others. That is not a request to save: saving
would wait for the dead. A signal handler cannot tell in time, for Python runs it only when the main
thread comes back from waiting; so a thread is woken by the signal itself and looks at the peers.
"""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from trainer.errors import FAILED


def leave_with_dead_peers(folder: Path, rank: int) -> None:
    """From now on, end this process if a signal arrives and a rank listed in `folder` is gone."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        while os.read(reader, 1):
            if not all(_alive(int(file.read_text() or "0")) for file in folder.glob("pid-*")):
                os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


def wake_peers(folder: Path) -> None:
    """Let ranks in `folder` that somebody has stopped (SIGSTOP) go on, to hear that it is over."""
    for file in folder.glob("pid-*"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGCONT)


def _alive(pid: int) -> bool:
    if pid == 0:  # its file is being written
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
