"""Noticing flags that never come, where the streams that wait for them cannot.

A stream that waits for a flag holds kernels, and sooner or later the host, but nobody counts the time.
So every wait is noted here as well, and a thread looks at the flags themselves now and then.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LOOKS = 20
"""How often a timeout is looked at flags, at most once in `RARELY` seconds."""
RARELY = 5.0


@dataclass(frozen=True)
class Expected:
    """A wait."""

    what: Any
    """For whoever looks whether it is over."""
    peer: int
    about: str
    since: float


class Watchdog:
    """Calls `late(peer, about)` once when nothing that is waited for has come for `timeout` seconds.

    `left` says which of some waits are not over. Time counts from the moment a wait was asked for,
    as for torch's own collectives, and begins anew whenever something arrives.
    """

    def __init__(
        self,
        left: Callable[[Sequence[Expected]], list[Expected]],
        timeout: float,
        late: Callable[[int, str], None],
    ) -> None:
        self._left, self._timeout, self._late = left, timeout, late
        self._new: deque[Expected] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tide-watchdog", daemon=True)
        self._thread.start()

    def expect(self, what: Any, peer: int, about: str) -> None:
        """Note a wait."""
        self._new.append(Expected(what, peer, about, time.monotonic()))

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        pending: list[Expected] = []
        progress = time.monotonic()
        while not self._closed.wait(min(self._timeout / LOOKS, RARELY)):
            while self._new:
                pending.append(self._new.popleft())
            if not pending:
                continue
            left = self._left(pending)
            now = time.monotonic()
            if len(left) < len(pending):
                progress = now
            pending = left
            if pending and now - max(progress, pending[0].since) > self._timeout:
                self._late(pending[0].peer, pending[0].about)
                return


def below(read: Callable[[], Sequence[int]]) -> Callable[[Sequence[Expected]], list[Expected]]:
    """For waits whose `what` is the number of a flag and a value; `read` returns what all flags are."""

    def left(expected: Sequence[Expected]) -> list[Expected]:
        values = read()
        return [each for each in expected if values[each.what[0]] < each.what[1]]

    return left
