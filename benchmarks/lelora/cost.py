"""What LeLoRA costs beside LoRA: steps of the recipe, and the decomposition of an 8B-shaped model.

    python -m benchmarks.lelora.cost --json lelora-cost.json

Steps are those of `python -m trainer` with everything that happens between them (decisions, meta
samples, the policy), from the first line of metrics to the last, on an encoder of MiniLM's sizes with
random weights. Methods take turns. Beside the whole, there is the median of the steps without a
decision or a checkpoint, and the median of what a decision adds; and how many operators both are made
of, which is counted with small layers on a CPU (`benchmarks.lelora.operators`). A matrix is decomposed
as the recipe does it, after a small one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.lelora.operators import count, read_trace
from benchmarks.results import write
from models.lelora.spectrum import decompose

ROOT = Path(__file__).parent.parent.parent
MINILM = ["model.num_layers=6", "model.hidden_size=384", "model.intermediate_size=1536",
          "model.num_heads=12", "model.dropout=0"]  # fmt: skip
METHODS = ("lora", "lelora", "frozen")
LLAMA_8B = {(4096, 4096): 64, (1024, 4096): 64, (14336, 4096): 96}
"""Matrices of 32 layers; the down projections are the up projections' transposes."""
EVERY = 10
SMALL = ["model.hidden_size=24", "model.intermediate_size=48", "model.num_heads=2",
         "data.max_length=16"]  # fmt: skip
"""For what does not depend on sizes."""
DECIDED = 20
"""The step after which the decision is made whose operators are counted: the second one."""


def run(folder: str, method: str, steps: int, more: Sequence[str], gpu: bool = True) -> Path:
    """Train once; returns the run folder."""
    words = [
        "+recipe=lelora_classify", *MINILM,
        f"lelora.method={method}",
        f"trainer.steps={steps}",
        "trainer.batch_size=32", "trainer.eval_every=0", f"logging.every={EVERY}",
        "logging.wandb.mode=disabled", "data.max_length=64", "launch.nproc=1",
        f"run.dir={folder}/run", f"lelora.cache_dir={folder}", *more,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=None if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return Path(folder) / "run"


def lines(file: Path) -> list[dict[str, Any]]:
    """Of a file with a JSON object a line; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def step_row(method: str, steps: int, more: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of one run's steps: of all, of those without a decision, and of a decision."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(folder, method, steps, more)
        every, decided = lines(found / "metrics.jsonl"), lines(found / "decisions.jsonl")
    return {
        "kind": "step",
        "method": method,
        "steps": steps,
        "decisions": len(decided),
        **parts(every, [row["step"] for row in decided]),
    }


@dataclass(frozen=True)
class Span:
    """The steps between two lines of metrics."""

    steps: int
    milliseconds: float
    """Of a step, without what training is paused for."""
    decisions: int
    saves: bool
    """A checkpoint is begun."""


def spans_of(
    rows: Sequence[Mapping[str, Any]], decided: Sequence[int], saved: Sequence[int]
) -> list[Span]:
    """From lines of metrics, and the steps after which something was decided or saved."""
    return [
        Span(
            steps=after["step"] - before["step"],
            milliseconds=1e3 * after["step_seconds"],
            decisions=sum(before["step"] < step <= after["step"] for step in decided),
            saves=any(before["step"] <= step < after["step"] for step in saved),
        )
        for before, after in pairwise(rows)
    ]


def parts(every: Sequence[Mapping[str, Any]], decided: Sequence[int]) -> dict[str, float | None]:
    """Milliseconds of a step, all in all and without a decision or checkpoint, and of a decision."""
    rows = [row for row in every if row["kind"] == "train"]
    saved = [row["step"] for row in every if row["kind"] == "save"]
    spans = spans_of(rows, decided, saved)
    spent = 1e3 * (rows[-1]["time"] - rows[0]["time"])
    plain = statistics.median(s.milliseconds for s in spans if not s.decisions and not s.saves)
    more = [s.steps * (s.milliseconds - plain) / s.decisions for s in spans if s.decisions]
    return {
        "milliseconds": spent / sum(s.steps for s in spans),
        "plain": plain,
        "decision": statistics.median(more) if more else None,
    }


def operators_row(method: str, more: Sequence[str]) -> dict[str, Any]:
    """Operators of a step, and of a decision; what sizes decide is left out."""
    seen = DECIDED + 2
    with tempfile.TemporaryDirectory() as folder:
        words = [*more, *SMALL, f"lelora.first={DECIDED // 2}", f"lelora.period={DECIDED // 2}",
                 "lelora.until=1", f"trainer.profile.steps=[{DECIDED - 1},{seen}]"]  # fmt: skip
        found = run(folder, method, seen, words, gpu=False)
        step, between = count(read_trace(found / "profile" / "rank0.json.gz"))
    decision = between if method == "lelora" else None
    return {"kind": "operators", "method": method, "step": step, "decision": decision}


def svd_row(shape: tuple[int, int], count: int, device: torch.device) -> dict[str, Any]:
    """Seconds of one decomposition of a matrix of this shape."""
    weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device) / shape[1] ** 0.5
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.monotonic()
    decompose(weight, range(min(64, *shape)))
    return {"kind": "svd", "shape": shape, "count": count, "seconds": time.monotonic() - began}


def main() -> None:
    """Measure, print and write after each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value, for all runs")
    parser.add_argument("--only", choices=["steps", "operators", "svd"])
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1, help="matrices so many times smaller")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        config = {"steps": options.steps, "overrides": options.overrides, "shrink": options.shrink}
        write(options.json, "lelora.cost", options.device, config, rows, {})

    methods = options.method or METHODS
    if options.only in (None, "steps"):
        for _ in range(options.repeats):
            for method in methods:
                keep(step_row(method, options.steps, options.overrides))
    if options.only in (None, "operators"):
        for method in methods:
            keep(operators_row(method, options.overrides))
    if options.only in (None, "svd"):
        device = torch.device(options.device)
        svd_row((64, 64), 0, device)
        for (m, n), count in LLAMA_8B.items():
            keep(svd_row((m // options.shrink, n // options.shrink), count, device))


if __name__ == "__main__":
    main()
