"""What our loop costs: the trainer beside the same model under plain FSDP2, in one run.

    python -m benchmarks.trunk [--device cpu|cuda] [--gpus N] [--quick] [--json FILE]

Both are separate processes, started in turn; both compute in bf16 on GPUs and fp32 on the CPU, with
one document a sequence, so the arithmetic is the same. The overhead is the ratio of the medians.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.results import write
from models.causal_lm import (
    CausalLMConfig,
    attention_width,
    build_causal_lm,
    matmul_parameters,
    transformers_config,
)
from trainer.watch.peak import peak_flops

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run both, in turn, and print medians and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        size = {"model": "tiny", "batch": 4, "length": 128, "ranks": 2, "every": 5}
    else:
        size = {"model": "llama1b", "batch": 2, "length": 8192, "ranks": options.gpus, "every": 5}
    rounds, size["steps"] = (1, 10) if options.quick else (options.rounds, options.steps)
    rows = []
    for number in range(rounds):
        # Alternate which goes first, so that a machine that warms up favours neither.
        kinds = (plain, ours) if number % 2 == 0 else (ours, plain)
        for kind in kinds:
            seconds = kind(size)[1:]  # the first interval compiles kernels and fills caches
            rows.append({"kind": kind.__name__, "round": number, "seconds_per_interval": seconds})
            print(json.dumps(rows[-1]), flush=True)
        summary = summarize(size, rows, options.device)
        if options.json:  # after every round, so that a run that is cut short leaves its figures
            write(options.json, "trunk", options.device, size, rows, summary)
    for key, value in summary.items():
        print(f"{key:28} {value}")


def summarize(size: dict[str, Any], rows: list[Any], device: str) -> dict[str, Any]:
    """Medians over all intervals of all rounds."""
    tokens = size["batch"] * size["length"] * size["ranks"]
    config = CausalLMConfig(**_preset(size["model"]))
    model = build_causal_lm(config, transformers_config(config, 257))
    pairs = tokens * (size["length"] + 1) / 2
    flops = 6 * matmul_parameters(model) * tokens + 12 * attention_width(model) * pairs
    peak = peak_flops(torch.device(device))
    summary: dict[str, Any] = {}
    for kind in ("plain", "ours"):
        all_seconds = [s for r in rows if r["kind"] == kind for s in r["seconds_per_interval"]]
        step = statistics.median(all_seconds) / size["every"]
        summary[f"{kind}_ms_per_step"] = round(1000 * step, 2)
        summary[f"{kind}_tokens_per_second"] = round(tokens / step)
        if peak:
            summary[f"{kind}_mfu"] = round(flops / step / size["ranks"] / peak, 4)
    summary["overhead"] = round(summary["ours_ms_per_step"] / summary["plain_ms_per_step"] - 1, 4)
    return summary


def plain(size: dict[str, Any]) -> list[float]:
    """Seconds per interval of the reference script."""
    preset = ROOT / "configs" / "model" / f"{size['model']}.yaml"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={size['ranks']}", "-m", "benchmarks.plain_fsdp2",
        str(preset), *(str(size[key]) for key in ("batch", "length", "steps", "every")),
    ]  # fmt: skip
    output = _run(command)
    line = next(line for line in output.splitlines() if line.startswith('{"seconds"'))
    return [float(s) for s in json.loads(line)["seconds"]]


def ours(size: dict[str, Any]) -> list[float]:
    """Seconds per interval of the trainer, reports included."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        # One document, longer than the run, of random bytes as in the reference: the embedding's
        # backward pass takes longer the fewer different tokens there are.
        needed = size["steps"] * size["batch"] * size["length"] * size["ranks"]
        text.write_bytes(random.Random(0).randbytes(needed + size["length"]))
        command = [
            sys.executable, "-m", "trainer", f"model={size['model']}",
            f"parallel={'fsdp' if size['model'] == 'tiny' else 'fsdp_bf16'}", "collectives=stock",
            f"data.files=[{text}]", "data.holdout=0", f"data.cache_dir={folder}/cache",
            f"data.sequence_length={size['length']}", f"trainer.steps={size['steps']}",
            f"trainer.batch_size={size['batch'] * size['ranks']}", "trainer.eval_every=0",
            f"logging.every={size['every']}", "logging.wandb.mode=disabled", "checkpoint.every=0",
            "checkpoint.at_end=false", f"run.dir={folder}/run", f"launch.nproc={size['ranks']}",
        ]  # fmt: skip
        _run(command)
        rows = [json.loads(row) for row in (Path(folder) / "run/metrics.jsonl").open()]
    return [row["step_seconds"] * size["every"] for row in rows if row["kind"] == "train"]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _preset(name: str) -> dict[str, Any]:
    return dict(OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml"))


if __name__ == "__main__":
    main()
