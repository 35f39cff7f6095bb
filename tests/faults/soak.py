"""A run under random faults, restarted by its launcher: `python -m tests.faults.soak --minutes 30`.

    python -m tests.faults.soak --minutes 10 --every 60

Every so often a rank is killed, stopped or asked for a fault at a random moment, while memory, open files and
shared memory of the launcher are noted; at the end every figure and the last checkpoint are those of a run
that nobody disturbed.
"""

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.campaign import COMMON, Campaign
from tests.faults.runs import SHARED, begin, check_nothing_left, orphans, run
from tests.processes import children
from tests.runs.helpers import finish, metrics

SETTINGS = (
    "checkpoint.every=20", "trainer.eval_every=100", "logging.every=10", "launch.timeout=20",
)  # fmt: skip


def readings(pid, before):
    """Memory in MiB and open files of the launcher, and the most of any of its ranks; and what ranks so
    far have left in /dev/shm."""
    ranks = [found for rank in children(pid) if (found := _reading(rank))]
    own = _reading(pid) or {"mib": 0, "files": 0}
    return {
        **own,
        "ranks": len(ranks),
        "rank_mib": max((found["mib"] for found in ranks), default=0),
        "rank_files": max((found["files"] for found in ranks), default=0),
        "shm": len(orphans(before)),
    }


def _reading(pid):
    """Of one process; nothing if it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)
        return {"mib": int(resident[1]) // 1024, "files": len(os.listdir(f"/proc/{pid}/fd"))}
    except (OSError, TypeError):
        return None


def strike(pid, chance):
    """A signal to a random rank; one that is stopped stays so, beyond the timeout."""
    ranks = children(pid)
    if not ranks:
        return None
    number = chance.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP, signal.SIGSEGV, signal.SIGABRT])
    victim = chance.choice(ranks)
    os.kill(victim, number)
    return signal.Signals(number).name


def soak(folder, minutes, every, chance, say):
    """Strike until the time is over, let the run end, and compare; returns the readings."""
    struck, end = folder / "struck", time.monotonic() + 60 * minutes
    struck.mkdir()
    before = set(SHARED.iterdir())
    words = [*COMMON, *SETTINGS, "trainer.steps=1000000", "launch.max_restarts=5"]
    process = begin(*words, cwd=struck)
    notes, blows = [], []
    while time.monotonic() < end and process.returncode is None:
        time.sleep(every * chance.uniform(0.5, 1.5))
        notes.append(
            {
                **readings(process.pid, before),
                "step": (metrics(struck / "r") or [{"step": 0}])[-1]["step"],
            }
        )
        if blow := strike(process.pid, chance):
            blows.append(blow)
            say(f"{len(blows):3} {blow:8} {json.dumps(notes[-1])}")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, 120)
    steps = metrics(struck / "r")[-1]["step"] // 100 * 100 + 100
    say(f"stopped with {code}; both runs to step {steps}")
    whole = folder / "whole"
    whole.mkdir()
    code, output = run(
        *COMMON, *SETTINGS, f"trainer.steps={steps}", "checkpoint.keep=2", cwd=whole, timeout=3600
    )
    assert code == 0, output
    code, output = run(*COMMON, *SETTINGS, f"trainer.steps={steps}", cwd=struck, timeout=3600)
    assert code == 0, output
    check_nothing_left(before, struck)
    return notes, blows, steps


def compare(folder, steps):
    """Every figure of every step, and the last checkpoint."""
    campaign = Campaign.__new__(Campaign)
    campaign.reference, campaign.run_dir = folder / "whole" / "r", folder / "struck" / "r"
    for row, same in zip(metrics(campaign.run_dir), metrics(campaign.reference), strict=True):
        assert (row["step"], row["loss"]) == (same["step"], same["loss"]), f"{row} is not {same}"
    campaign.compare("the soak")
    assert metrics(campaign.run_dir)[-1]["step"] == steps


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--every", type=float, default=60, help="seconds between faults, on average"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep both runs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        notes, blows, steps = soak(
            folder, options.minutes, options.every, random.Random(options.seed),
            lambda text: print(text, flush=True),
        )  # fmt: skip
        compare(folder, steps)
    print(json.dumps({"first": notes[0], "last": notes[-1], "blows": len(blows), "steps": steps}))
    print("equal bit for bit")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - the environment of tests

    main()
