"""What a run's files say of it when rank 0 could not: it was killed, or only saw a peer go."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import FAILED
from trainer.watch.metrics import Metrics, read
from trainer.watch.page import write_page


def note_failure(run_dir: Path, code: int, text: str, since: float = 0.0) -> None:
    """Write the page of a run that failed, and the reason if its rank 0 has not; no rank is left.

    What rank 0 took for the reason, such as a peer that went away, gives way to what the launcher saw.
    An end that was written before the time `since` is that of an earlier attempt, and stands.
    """
    file = run_dir / "metrics.jsonl"
    rows = read(file)
    known = [row for row in rows if row["kind"] in ("start", "end")]
    if not known:  # it never began
        return
    last, why = known[-1], shortened(text)
    own_end = last["kind"] == "end" and last.get("time", since) >= since
    said = own_end and (last["code"] != FAILED or last["why"] == why)
    with suppress(OSError, ValueError):  # the failure itself is what is to be heard of
        if not said:
            metrics, step = Metrics(file), _done(rows)  # all rows stay
            metrics.open(step, without=last if own_end else None)
            end = {"kind": "end", "step": step, "code": code, "why": why, "time": time.time()}
            metrics.write(end)
            metrics.close()
        write_page([run_dir], run_dir / "report.html")


def _done(rows: list[dict[str, Any]]) -> int:
    """The last step that any row knows to be done; one that stalls is not."""
    return max(row["step"] for row in rows if row["kind"] != "stall")


def shortened(text: str) -> str:
    """The first line and the last: who failed, and what of."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
