"""What plans promise and what runs take, and what saving in the background costs, on GPUs.

    python -m benchmarks.runs [--gpus N] [--only plans|large|saving] [--json FILE]
    python -m benchmarks.runs --plan-again FILE      # no GPU: plans by today's code, runs as measured

Every case is `python -m trainer` in a process of its own. Planned memory stands beside the most that
the run's tensors took (the caching allocator's count, and slots of symmetric memory), planned time
beside the median of its steps. For saving, the same run goes with checkpoints and without, in turn.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "1B": ["+recipe=llama1b", "trainer.micro_batch_size=2"],
    "1B, stock": ["+recipe=llama1b", "trainer.micro_batch_size=2", "collectives=stock"],
    "1B, recomputed, 4 micro-batches": [
        "+recipe=llama1b", "trainer.micro_batch_size=1", "parallel.activation_checkpointing=block",
    ],
    "8B, recomputed": ["+recipe=llama8b_fsdp_tide", "trainer.micro_batch_size=1"],
}  # fmt: skip
LARGE = {
    "Qwen3-30B-A3B, 6 layers": [
        "+recipe=qwen3_30b_a3b_fsdp_tide", "model.num_layers=6", "trainer.micro_batch_size=2",
    ],
    "Wan 2.2, 8 layers": [
        "+recipe=wan22_fsdp_tide", "model.num_layers=8", "trainer.micro_batch_size=1",
    ],
}  # fmt: skip
"""Recipes cut down to few GPUs."""
MICRO_BATCHES = {
    "1B, recomputed, 4 micro-batches": 4,
    "Qwen3-30B-A3B, 6 layers": 2,
    "Wan 2.2, 8 layers": 2,
}
STEPS, EVERY = 120, 60
"""Of a run that saves, and how often it does."""


def main() -> None:
    """Run all cases and print what they said."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--only", choices=["plans", "large", "saving"])
    parser.add_argument("--rounds", type=int, default=2, help="of saving and not saving")
    parser.add_argument("--folder", type=Path, help="where the runs are, and their checkpoints go")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plan-again", type=Path)
    options = parser.parse_args()
    if options.plan_again:
        plan_again(options.plan_again)
        return
    if options.folder:
        tempfile.tempdir = str(options.folder)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            write(
                options.json,
                "runs",
                "cuda",
                {"gpus": options.gpus, "folder": str(options.folder or "")},
                rows,
                summarize(rows),
            )

    for kind, cases in (("plans", PLANS), ("large", LARGE)):
        if options.only in (None, kind):
            for name, words in cases.items():
                keep(plan(name, words, options.gpus))
    if options.only in (None, "saving"):
        for number in range(options.rounds):
            for every in (0, EVERY) if number % 2 == 0 else (EVERY, 0):
                keep(saving(number, every, options.gpus))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest errors of plans, and what saving adds to a step."""
    found: dict[str, Any] = {}
    for what in ("gib", "ms"):
        errors = [
            abs(r[f"planned_{what}"] / r[f"measured_{what}"] - 1)
            for r in rows if r["what"] == "plan"
        ]  # fmt: skip
        if errors:
            found[f"plan_{what}_error"] = round(max(errors), 4)
    times = {
        saves: [
            r["ms_per_step"] for r in rows if r["what"] == "saving" and bool(r["every"]) == saves
        ]
        for saves in (False, True)
    }
    if all(times.values()):
        with_, without = (statistics.mean(times[saves]) for saves in (True, False))
        found["saving_overhead"] = round(with_ / without - 1, 4)
    return found


def plan_again(file: Path) -> None:
    """Put the plans of today's code into a result, for the device that it was measured on."""
    result = json.loads(file.read_text())
    gpus, device = result["config"]["gpus"], result["machine"]["device"].split()[-1].lower()
    for row in result["rows"]:
        if row["what"] == "plan":
            words = options_of(row["case"], (PLANS | LARGE)[row["case"]], gpus)
            row |= planned([*words, f"launch.device={device}"])
    result["summary"] = summarize(result["rows"])
    file.write_text(json.dumps(result, indent=1) + "\n")


def options_of(name: str, words: list[str], gpus: int) -> list[str]:
    """What a case is run with on so many GPUs."""
    micro = int(next(w for w in words if "micro_batch_size" in w).partition("=")[2])
    batch = gpus * micro * MICRO_BATCHES.get(name, 1)
    return [*words, f"trainer.batch_size={batch}", f"launch.nproc={gpus}"]


def planned(words: list[str]) -> dict[str, float]:
    """Memory and time of a dry run."""
    with tempfile.TemporaryDirectory() as folder:
        said = _trainer([*words, "trainer.dry_run=true"], folder)
    memory = re.search(r"memory a rank +([\d.]+) GiB", said)
    time = re.search(r"about ([\d,]+) ms", said)
    assert memory is not None
    assert time is not None
    return {"planned_gib": float(memory[1]), "planned_ms": float(time[1].replace(",", ""))}


def plan(name: str, words: list[str], gpus: int) -> dict[str, Any]:
    """One case: its dry run, then six steps of it."""
    common = options_of(name, words, gpus)
    said = planned(common)
    with tempfile.TemporaryDirectory() as folder:
        measured = _rows([*common, "trainer.steps=6", "logging.every=1"], folder)
    last = measured[-1]
    return {
        "what": "plan",
        "case": name,
        **said,
        "measured_gib": round(last["memory_allocated_gib"] + last["memory_symmetric_gib"], 2),
        "reserved_gib": round(last["memory_gib"] + last["memory_symmetric_gib"], 2),
        "measured_ms": round(1000 * statistics.median(r["step_seconds"] for r in measured[2:]), 1),
        "mfu": last["mfu"],
    }


def saving(number: int, every: int, gpus: int) -> dict[str, Any]:
    """The 1B run, with a checkpoint every so many steps (0: none)."""
    words = [
        "+recipe=llama1b", f"trainer.batch_size={2 * gpus}", f"launch.nproc={gpus}",
        f"trainer.steps={STEPS}", f"checkpoint.every={every}", "checkpoint.keep=1",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows(words, folder)
        events = _events(folder)
    counted = [row for row in rows if row["step"] > 10]
    paused = sum(row["saving_seconds"] * 10 for row in counted)
    whole = sum(row["step_seconds"] * 10 for row in counted) + paused
    return {
        "what": "saving",
        "round": number,
        "every": every,
        "ms_per_step": round(1000 * whole / (10 * len(counted)), 2),
        "ms_by_interval": [round(1000 * row["step_seconds"], 1) for row in rows],
        "paused_ms": round(1000 * paused, 1),
        "write_seconds": [e["write_seconds"] for e in events if e["kind"] == "save"],
    }


def _rows(words: list[str], folder: str) -> list[dict[str, Any]]:
    kept = ["checkpoint.at_end=false", "trainer.eval_every=0", f"run.dir={folder}/run"]
    _trainer([*words, *kept], folder)
    return [row for row in _events(folder) if row["kind"] == "train"]


def _events(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _trainer(words: list[str], folder: str) -> str:
    command = [sys.executable, "-m", "trainer", *words, "logging.wandb.mode=disabled"]
    environment = {
        **os.environ,
        "COLUMNS": "300",
        "SPRINGTIDE_CACHE": f"{folder}/../springtide-bench",
    }
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
