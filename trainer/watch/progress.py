"""What the console shows: a live line on a terminal, plain lines elsewhere."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ProgressLine:
    """One line about where the run stands."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self._live: Progress | None = None
        self._bar: Any = None

    def open(self, step: int) -> None:
        """Show the line, on a terminal."""
        if self.console.is_terminal:
            self._live = Progress(
                BarColumn(bar_width=24), TextColumn("{task.description}"), console=self.console
            )
            self._live.start()
            self._bar = self._live.add_task("starting", total=self.steps, completed=step)

    def update(self, row: dict[str, Any], seconds_left: float) -> None:
        """Say how the run stands after the row's step."""
        text = describe(row, self.steps, seconds_left)
        if self._live is None:
            self.say(text)
        else:
            self._live.update(self._bar, completed=row["step"], description=text)

    def say(self, text: str) -> None:
        """Print a line that stays; nobody has to be there to read it."""
        with suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state of the line on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def describe(row: dict[str, Any], steps: int, seconds_left: float) -> str:
    """`step 120/1000  loss 2.3451  norm 0.81  14.2k tokens/s  ...`."""
    width = len(str(steps))
    parts = [
        f"step {row['step']:>{width}}/{steps}",
        f"loss {row['loss']:.4f}",
        f"norm {row['grad_norm']:.3g}",
        f"{short(row['tokens_per_second'])} tokens/s",
    ]
    if row.get("mfu") is not None:
        parts.append(f"mfu {100 * row['mfu']:.1f} %")
    parts.append(f"{row['memory_gib']:.1f} GiB")
    if row["skipped"]:
        parts.append(f"{row['skipped']} skipped")
    parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


def short(number: float) -> str:
    """1234567 -> `1.23M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
