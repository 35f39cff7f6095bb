"""Random blows to one run, each compared with a run that had none: `python -m tests.faults.randomised`.

    python -m tests.faults.randomised --blows 200 --seed 7

A blow is a kill mostly, else any other fault, of a random rank at a random moment, under settings that
change nothing about the numbers. Says what it did; the seed repeats it, but for how processes are timed.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.campaign import Campaign, undisturbed
from tests.faults.inject import FIRST_RANK, Fault

MOMENTS = {
    "data": 6, "agree": 4, "forward": 4, "backward": 4, "all-gather": 12, "gathered": 12,
    "reduce-scatter": 8, "norm": 4, "optimizer": 4, "evaluation": 1, "copy": 2, "shards": 2,
    "checksums": 3, "restore": 1, "report": 6, "open": 1, "room": 2, "metadata": 2, "progress": 2,
    "manifest": 2, "commit": 2, "pointer": 2, "purge": 2, "purging": 2,
}  # fmt: skip
"""And how often a rank comes there before the run has taken a few steps."""
NEVER = {
    "collectives=stock": ("all-gather", "gathered", "reduce-scatter"),
    "checkpoint.background=false": ("copy",),
}
"""Settings under which a rank does not come there."""
WRITING = ("shards", "checksums", "room", "metadata", "progress", "manifest", "commit", "pointer")
SAME_NUMBERS = ([], [], ["trainer.workers=1"], ["checkpoint.background=false"],
                ["collectives=stock"], ["trainer.micro_batch_size=4"])  # fmt: skip
"""Settings that no number depends on."""


def random_fault(chance):
    """Any moment, any rank that has it; kills are seven of ten."""
    phase = chance.choice(sorted(MOMENTS))
    others = ["exit", "raise", "memory", "stop"]
    if phase in WRITING:
        others += ["ENOSPC", "EROFS", "EIO"] * 2
    what = "kill" if chance.random() < 0.7 else chance.choice(others)
    rank = 0 if phase in FIRST_RANK else chance.randrange(2)
    return Fault(what, phase, rank, chance.randint(1, MOMENTS[phase]))


def strike_at_random(folder, blows, chance, say=print):
    """So many blows and the end; returns how many there were of each kind."""
    steps = 4 * blows
    campaign = Campaign(folder / "struck", undisturbed(folder / "whole", steps), steps)
    counts = Counter()
    for number in range(blows):
        fault = random_fault(chance)
        changes = chance.choice(SAME_NUMBERS)
        changes = [word for word in changes if fault.phase not in NEVER.get(word, ())]
        begin = time.monotonic()
        code, output = campaign.strike(fault, *changes)
        counts[fault.what] += 1
        last = output.strip().splitlines()[-1][:100]
        seconds = time.monotonic() - begin
        say(
            f"{number + 1:4} {fault.what:7} {fault.phase:15} rank {fault.rank} at {fault.at:2} "
            f"{' '.join(changes):28} -> {code} in {seconds:4.1f} s: {last}"
        )
    campaign.finish()
    return counts


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.randomised", description=__doc__)
    parser.add_argument("--blows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = strike_at_random(
            Path(folder), options.blows, random.Random(seed), lambda text: print(text, flush=True)
        )
    kinds = ", ".join(f"{number} {what}" for what, number in counts.most_common())
    print(f"{options.blows} blows ({kinds}) in {time.monotonic() - begin:.0f} s: equal bit for bit")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - the environment of tests

    main()
