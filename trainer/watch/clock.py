"""How long the parts of a step take, without waiting for the device.

Entering or leaving a part leaves a mark: the time on the CPU, an event in the compute's stream on a
GPU. The time from one mark to the next belongs to the part that is innermost between them, so parts
never overlap, and waiting for communication inside the forward pass is not forward pass.

    marks     data    forward   communication   forward   -    backward ...
              |-------|---------|---------------|---------|    |---------

On a GPU a part lasts from when the device comes to it until it has done it: data that the host reads
while the device is busy takes no time. Events are read when a report waits for the device anyway.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import record_function

T = TypeVar("T")

COMMUNICATION = "communication"
PHASES = ("data", "forward", "backward", COMMUNICATION, "optimizer")
"""The parts of a step, each without the communication that it waits for."""


class Marks(Protocol):
    """Moments, and the time between two of them."""

    def now(self) -> Any:
        """This moment."""
        ...

    def reach(self, last: Any) -> None:
        """Wait until the moment has come."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have come."""
        ...

    def give_back(self, marks: list[Any]) -> None:
        """These moments are not asked for again."""
        ...


class HostMarks:
    """Moments of this process."""

    def now(self) -> float:
        """See `Marks`."""
        return time.perf_counter()

    def reach(self, last: float) -> None:
        """It has come."""

    def seconds(self, begin: float, end: float) -> float:
        """See `Marks`."""
        return end - begin

    def give_back(self, marks: list[Any]) -> None:
        """Nothing is kept of them."""


class StreamMarks:
    """Moments of a GPU's current stream: events, used again and again."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        """See `Marks`."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reach(self, last: torch.cuda.Event) -> None:
        """See `Marks`."""
        last.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Marks`."""
        return begin.elapsed_time(end) / 1e3

    def give_back(self, marks: list[Any]) -> None:
        """See `Marks`."""
        self._spare += marks


class Clock:
    """`with clock("forward"): ...`, and `clock.read()` at a report."""

    def __init__(self, marks: Marks) -> None:
        self._clock = marks
        self._marks: list[tuple[str | None, Any]] = []
        self._inside: list[str] = []

    @property
    def inside(self) -> str | None:
        """The part of the step that is under way; other threads may ask, too."""
        return next(reversed(list(self._inside)), None)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """What is done inside is this part of the step; profiles show it by this name."""
        with record_function(phase), self._in(phase):
            yield

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Inside a part: compute waits for other ranks. Elsewhere it is not the step's time."""
        if self._inside:
            with self._in(COMMUNICATION):
                yield
        else:
            yield

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        self._inside.append(phase)
        self._mark()
        try:
            yield
        finally:
            self._inside.pop()
            self._mark()

    def _mark(self) -> None:
        self._marks.append((self._inside[-1] if self._inside else None, self._clock.now()))

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the time to get each is this part's."""
        iterator = iter(items)
        while True:
            with self(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last call; not to be called inside of one."""
        totals = dict.fromkeys(PHASES, 0.0)
        if self._marks:
            self._clock.reach(self._marks[-1][1])
        for (phase, begin), (_, end) in pairwise(self._marks):
            if phase is not None:
                totals[phase] += self._clock.seconds(begin, end)
        self._clock.give_back([mark for _, mark in self._marks])
        self._marks.clear()
        return totals


def make_clock(device: torch.device) -> Clock:
    """The clock of what runs on `device`."""
    return Clock(StreamMarks() if device.type == "cuda" else HostMarks())
