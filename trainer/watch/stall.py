"""A step that takes far longer than those before: where every rank is, while it still is there.

A thread on each rank looks once a second. The host may be steps ahead of a GPU, so what counts is the
time since the last report: after it, `n` finished steps and the one under way may take

    (n + factor) x the median step,    and at least `LEAST` seconds for the last of them

Each rank that is late writes its stacks to `stalls/` in the run folder; a rank that is stopped, or whose
machine is gone, writes nothing, which tells as much. The lowest rank that could says who is where,
on the console and in a row of `metrics.jsonl`.
"""

import faulthandler
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

LEAST = 10.0
"""Seconds that any step may take, however short the others are."""
ENOUGH = 3
"""Reports before a median means something: the first one has what is built and compiled in it."""
PATIENCE = 3.0
"""Seconds for the other ranks' files to appear."""
ROOT = Path(__file__).parents[2]
OURS = ("collectives", "parallel", "recipes", "models", "trainer")


class Stalls:
    """Looks after one rank; `factor` 0: it does not. `inside` tells the part of the step, if any."""

    def __init__(
        self,
        factor: float,
        folder: Path,
        rank: int,
        ranks: int,
        inside: Callable[[], str | None],
        say: Callable[[str], None],
        note: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ) -> None:
        self._factor, self._folder, self._rank, self._ranks = factor, folder, rank, ranks
        self._inside, self._say, self._note = inside, say, note
        self._main = threading.get_ident()
        self._seconds: list[float] = []
        self._step, self._since, self._ahead, self._told = 0, 0.0, 0, False
        self._paused = True
        self._closed = threading.Event()
        if factor:
            threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def step(self, number: int) -> None:
        """The host has come to the end of a step."""
        self._step, self._ahead = number, self._ahead + 1

    def report(self, seconds: float) -> None:
        """All steps so far are over; they took so long each."""
        self._seconds = [*self._seconds[-99:], seconds]
        self._since, self._ahead, self._told, self._paused = time.monotonic(), 0, False, False

    def pause(self) -> None:
        """What comes now is no step; until the next report, nobody looks."""
        self._paused = True

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def late(self, now: float) -> float | None:
        """How many seconds the step under way has taken, if that is too long."""
        if self._paused or self._told or len(self._seconds) < ENOUGH:
            return None
        usual = statistics.median(self._seconds[1:])
        own = now - self._since - self._ahead * usual
        return own if own > max(self._factor * usual, LEAST) else None

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if (seconds := self.late(time.monotonic())) is not None:
                self._told = True
                try:
                    self._tell(seconds, statistics.median(self._seconds[1:]))
                except OSError as error:
                    self._say(f"a step stalls, and its stacks cannot be written: {error}")

    def _tell(self, seconds: float, usual: float) -> None:
        """Leave this rank's stacks; the lowest rank then says what all have left."""
        self._folder.mkdir(exist_ok=True)
        step = self._step + 1
        frame = sys._current_frames().get(self._main)
        where = f"{self._inside() or 'between steps'}, {innermost(frame)}"
        with self._file(step, self._rank).open("w") as file:
            file.write(f"{where}\nrank {self._rank}, step {step}, {seconds:.0f} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
        if self._closed.wait(PATIENCE):
            return
        files = {rank: self._file(step, rank) for rank in range(self._ranks)}
        there = {
            rank: file.read_text().partition("\n")[0]
            for rank, file in files.items()
            if file.is_file()
        }
        if self._rank == min(there):
            silent = "silent: it is stopped, or hangs where no thread of it runs, or is gone"
            self._say(
                f"step {step} has taken {seconds:.0f} s instead of {usual:.3g}; stacks are in "
                f"{self._folder.name}/"
            )
            lines = grouped([there.get(rank, silent) for rank in files])
            for line in lines:
                self._say(f"  {line}")
            row = {"kind": "stall", "step": step, "seconds": seconds, "usual_seconds": usual}
            self._note({**row, "ranks": lines})

    def _file(self, step: int, rank: int) -> Path:
        return self._folder / f"step-{step:08d}-rank{rank}.txt"


def innermost(frame: FrameType | None) -> str:
    """The function of ours that is deepest in a stack, and where it stands."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(ROOT / name) for name in OURS):
            return f"{frame.f_code.co_name} ({path.relative_to(ROOT)}:{frame.f_lineno})"
        frame = frame.f_back
    return "outside our code"


def grouped(lines: list[str]) -> list[str]:
    """`rank 1: ...`, or `ranks 0, 2-7: ...`, for what each rank says, in the order of their first."""
    of: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        of.setdefault(line, []).append(rank)
    return [f"rank{'s' if len(r) > 1 else ''} {_short(r)}: {line}" for line, r in of.items()]


def _short(ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> `0, 2-4`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
