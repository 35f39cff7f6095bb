"""What LeLoRA costs beside LoRA: steps of the recipe, and the decomposition of an 8B-shaped model.

    python -m benchmarks.lelora.cost --json lelora-cost.json

Steps are those of `python -m trainer` with everything that happens between them (decisions, meta
samples, the policy), from the first line of metrics to the last, on an encoder of MiniLM's sizes with
random weights. Methods take turns. A matrix is decomposed as the recipe does it, after a small one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from models.lelora.spectrum import decompose

ROOT = Path(__file__).parent.parent.parent
MINILM = ["model.num_layers=6", "model.hidden_size=384", "model.intermediate_size=1536",
          "model.num_heads=12", "model.dropout=0"]  # fmt: skip
METHODS = ("lora", "lelora", "frozen")
LLAMA_8B = {(4096, 4096): 64, (1024, 4096): 64, (14336, 4096): 96}
"""Matrices of 32 layers; the down projections are the up projections' transposes."""
EVERY = 20


def step_row(method: str, steps: int, more: Sequence[str]) -> dict[str, Any]:
    """Milliseconds a step of one run, everything included."""
    with tempfile.TemporaryDirectory() as folder:
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
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        decisions = Path(folder) / "run" / "decisions.jsonl"
        decided = len(decisions.read_text().splitlines()) if decisions.exists() else 0
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    spent = rows[-1]["time"] - rows[0]["time"]
    each = 1e3 * spent / (rows[-1]["step"] - rows[0]["step"])
    return {
        "kind": "step",
        "method": method,
        "milliseconds": each,
        "steps": steps,
        "decisions": decided,
    }


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
    parser.add_argument("--only", choices=["steps", "svd"])
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

    if options.only != "svd":
        for _ in range(options.repeats):
            for method in options.method or METHODS:
                keep(step_row(method, options.steps, options.overrides))
    if options.only != "steps":
        device = torch.device(options.device)
        svd_row((64, 64), 0, device)
        for (m, n), count in LLAMA_8B.items():
            keep(svd_row((m // options.shrink, n // options.shrink), count, device))


if __name__ == "__main__":
    main()
