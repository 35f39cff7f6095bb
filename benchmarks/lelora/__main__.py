"""Adapters against each other on three tasks, with seeds, intervals and a verdict in words.

    python -m benchmarks.lelora --data lelora-data.xz --out runs/lelora --json lelora.json

`benchmarks.lelora.prepare` makes the data. What is finished is kept in --out: the same command goes on
from it, and with `--seconds` starts no batch of runs when that time is over. `benchmarks.lelora.page`
makes tables of the result.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lelora.checks import check, clock
from benchmarks.lelora.classification import TUNING, Classifications
from benchmarks.lelora.data import read
from benchmarks.lelora.methods import METHODS
from benchmarks.lelora.policy import School
from benchmarks.lelora.prepare import LENGTHS
from benchmarks.lelora.study import TAUGHT, Study
from benchmarks.lelora.training import Plan
from benchmarks.results import write

CORE = ("lora", "rslora", "frozen", "random", "full")
ONLINE = ("online",)
REST = tuple(method for method in METHODS if method not in (*CORE, *TAUGHT, *ONLINE))
PARTS = ("core", "taught", "online", "rest", "clock")


def measure(study: Study, task: str, part: str) -> None:
    """One part of a task. The taught need the core's learning rates."""
    if part == "clock":
        clock(study, task, METHODS)
        return
    if part == "taught":
        study.teach(task)
    methods = {"core": CORE, "taught": TAUGHT, "online": ONLINE, "rest": REST}[part]
    study.tune(task, methods)
    study.compare(task, methods)
    if task == "wordnet":
        check(study, task)


def results(study: Study, file: Path, device: str) -> None:
    """Write everything that there is."""
    config, found = {**study.cells["about"], "dtype": str(study.dtype)}, study.cells["tasks"]
    summary = {
        "tasks": {
            t: {**{k: v for k, v in of.items() if k != "runs"}, "tuning": _tuned(of["tuning"])}
            for t, of in found.items()
        },
        "checks": [of["check"] for of in found.values() if "check" in of],
    }
    rows = [
        {"task": t, "method": method, "runs": runs}
        for t, of in found.items()
        for method, runs in of["runs"].items()
    ]
    write(file, "lelora", device, config, rows, summary)


def _tuned(tuning: dict[str, Any]) -> dict[str, Any]:
    """Loss and accuracy of each run, without what each text came to."""
    return {
        method: {
            lr: {seed: [run["loss"], run["accuracy"]] for seed, run in of.items()}
            for lr, of in rates.items()
        }
        for method, rates in tuning.items()
    }


def main() -> None:
    """Parse, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="of benchmarks.lelora.prepare")
    parser.add_argument("--task", action="append", choices=list(LENGTHS), help="all of them")
    parser.add_argument("--part", action="append", choices=PARTS, help="all, the core first")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--runs", type=int, default=64, help="of a population")
    parser.add_argument("--rounds", type=int, default=6, help="of populations")
    parser.add_argument("--taught-steps", type=int, default=150, help="of each run of a population")
    parser.add_argument("--heads", type=int, default=12, help="of the encoder's attention")
    parser.add_argument("--texts", type=int, help="at most so many validation and test texts")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/lelora-study"))
    parser.add_argument("--json", type=Path, default=Path("runs/lelora-study/lelora.json"))
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    stored = read(options.data)
    if options.texts:
        cut = {n for n in stored if "/validation/" in n or "/test/" in n}
        stored = {n: t[: options.texts] if n in cut else t for n, t in stored.items()}
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    try:
        subjects = Classifications(
            stored, rank=options.rank, steps=options.steps, device=device, heads=options.heads
        )
        study = Study(
            subjects, options.out, Plan(options.steps, options.batch_size),
            School(options.runs, options.rounds, options.taught_steps), TUNING, rank=options.rank,
            seeds=options.seeds, dtype=dtype, until=began + options.seconds,
            say=lambda line: print(f"{time.monotonic() - began:6.1f} {line}", flush=True),
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    tasks = options.task or list(LENGTHS)
    pieces = [(task, part) for part in options.part or PARTS for task in tasks]
    if not options.part:  # what matters most comes first
        pieces = [piece for piece in pieces if piece[1] != "clock" or piece[0] == tasks[0]]
        pieces.sort(key=lambda piece: (max(PARTS.index(piece[1]), 2), tasks.index(piece[0])))
    for task, part in pieces:
        try:
            measure(study, task, part)
        except TimeoutError:
            print(f"{task}, {part}: no time left, the same command goes on from here")
            break
        results(study, options.json, options.device)
    if "tasks" in study.cells:
        results(study, options.json, options.device)
    print(f"{time.monotonic() - began:.0f} s; everything is in {options.json}")


if __name__ == "__main__":
    main()
