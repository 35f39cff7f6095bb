"""The comparison on a language model: from modern to King James verse, in books that it has not seen.

    python -m benchmarks.lelora.kjv --data kjv.safetensors --json lelora-kjv.json

`benchmarks.lelora.prepare_kjv` makes the data. As for the encoder, what is finished is kept in --out:
the same command goes on from it, and with `--seconds` begins nothing when that time is over.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.lelora.__main__ import results
from benchmarks.lelora.checks import check, clock
from benchmarks.lelora.data import read
from benchmarks.lelora.policy import School
from benchmarks.lelora.study import TAUGHT, Study
from benchmarks.lelora.training import Plan
from benchmarks.lelora.verses import TUNING, Verses

TASK = "kjv"
PIECES = (
    ("lora", "frozen", "random"), ("full",), TAUGHT, ("rslora", "dora", "pissa"),
    ("eva", "adalora", "frozen-half"), ("milora", "mica", "loraxs"),
)  # fmt: skip
"""Methods that are tuned and compared together, most wanted first. `learned` needs `frozen`'s rate."""
METHODS = tuple(method for piece in PIECES for method in piece)


def measure(study: Study, methods: Sequence[str]) -> None:
    """One piece."""
    if not methods:
        return
    if set(methods) & set(TAUGHT):
        study.teach(TASK)
    study.tune(TASK, methods)
    study.compare(TASK, methods)


def main() -> None:
    """Parse, measure, and write the result after every piece."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="of benchmarks.lelora.prepare_kjv")
    parser.add_argument(
        "--method", action="append", choices=METHODS, help="all, in the order of worth"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=24, help="of a population")
    parser.add_argument("--rounds", type=int, default=4, help="of populations")
    parser.add_argument("--taught-steps", type=int, default=50, help="of each run of a population")
    parser.add_argument("--at-once", type=int, default=24, help="runs beside each other")
    parser.add_argument("--pairs", type=int, help="at most so many of validation and test")
    parser.add_argument(
        "--no-check", action="store_true", help="without runs in 32 bits and the clock"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/lelora-kjv"))
    parser.add_argument("--json", type=Path, default=Path("runs/lelora-kjv/lelora-kjv.json"))
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    verses = Verses(
        read(options.data),
        rank=options.rank,
        steps=options.steps,
        device=device,
        pairs=options.pairs,
    )
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    try:
        study = Study(
            verses, options.out, Plan(options.steps, options.batch_size),
            School(options.runs, options.rounds, options.taught_steps), TUNING, rank=options.rank,
            seeds=options.seeds, dtype=dtype, at_once=options.at_once, until=began + options.seconds,
            say=lambda line: print(f"{time.monotonic() - began:6.1f} {line}", flush=True),
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    wanted = options.method or METHODS
    try:
        for piece in PIECES:
            methods = [method for method in piece if method in wanted]
            measure(study, methods)
            results(study, options.json, options.device)
        if not options.no_check:
            check(study, TASK)
            clock(study, TASK, wanted, steps=15)
    except TimeoutError:
        print("no time left: the same command goes on from here")
    if "tasks" in study.cells:
        results(study, options.json, options.device)
    print(f"{time.monotonic() - began:.0f} s; everything is in {options.json}")


if __name__ == "__main__":
    main()
