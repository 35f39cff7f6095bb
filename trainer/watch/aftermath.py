"""What a run's files say of it when rank 0 could not: it was killed, or only saw a peer go."""

import time
from contextlib import suppress
from pathlib import Path

from trainer.errors import FAILED
from trainer.watch.metrics import Metrics, read
from trainer.watch.page import write_page


def note_failure(run_dir: Path, code: int, text: str) -> None:
    """Write the page of a run that failed, and the reason if its rank 0 has not; no rank is left.

    What rank 0 took for the reason, such as a peer that went away, gives way to what the launcher saw.
    """
    file = run_dir / "metrics.jsonl"
    rows = read(file)
    known = [row for row in rows if row["kind"] in ("start", "end")][-1:]
    if not known:  # it never began
        return
    why = shortened(text)
    with suppress(OSError, ValueError):  # the failure itself is what is to be heard of
        if known[0].get("code", FAILED) == FAILED and known[0].get("why") != why:
            metrics, step = Metrics(file), rows[-1]["step"]
            metrics.open(step, without=known[0] if known[0]["kind"] == "end" else None)
            end = {"kind": "end", "step": step, "code": code, "why": why, "time": time.time()}
            metrics.write(end)
            metrics.close()
        write_page([run_dir], run_dir / "report.html")


def shortened(text: str) -> str:
    """The first line and the last: who failed, and what of."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
