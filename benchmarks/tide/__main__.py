"""FSDP2 on torch's collectives and on TIDE, side by side.

    python -m benchmarks.tide --device cpu [--ranks N] [--node-size N] [--quick] [--json FILE]
    python -m benchmarks.tide --device cuda [--ranks N] [--model llama8b --layers 0 --checkpointing]
        [--lengths 1024 2048] [--quick] [--json FILE]

Separate processes, in turn. On the CPU the bytes are the figures to look at: how many a step reads and
writes, by cause, and how much memory slots and staging take; its times are no evidence for GPUs. On
GPUs it times four layers of the shape of Llama 3.1 70B (or another preset, or the video transformer
`wan22`, which needs diffusers), the forward and backward passes by themselves
and the whole step, and takes the kernels of one step down.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.tide.kinds import ENVIRONMENT, ON_CPU, ON_GPUS
from benchmarks.tide.tables import summarize, table, times
from benchmarks.tide.worker import FOUND

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    """Run every kind in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--node-size", type=int, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=None)
    parser.add_argument("--layers", type=int, default=4, help="of the model, on GPUs; 0: all")
    parser.add_argument("--batch", type=int, default=1, help="samples a GPU")
    parser.add_argument("--checkpointing", action="store_true", help="of every block")
    parser.add_argument("--kinds", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config: dict[str, Any] = {
        "device": options.device, "ranks": options.ranks,
        "node_size": options.node_size or options.ranks,
        "steps": 2 if options.quick else options.steps,
    }  # fmt: skip
    depth = {"num_layers": options.layers} if options.layers else {}
    if options.checkpointing:
        config["parallel"] = {"activation_checkpointing": "block"}
    if options.device == "cpu":
        config |= {"model": options.model or "tiny", "batch": 2, "lengths": [128]}
        name, show, all_kinds = "tide-cpu", table, list(ON_CPU)
    else:
        config |= {
            "model": options.model or "llama70b", "batch": options.batch, "warmup": 4,
            "lengths": options.lengths or [1024, 2048, 4096, 8192],
            "changes": ({"vocab_size": 32000} if options.model is None else {}) | depth,
        }  # fmt: skip
        name, show, all_kinds = "tide-gpu", times, list(ON_GPUS)
    kinds = options.kinds or all_kinds
    model = config["model"].removeprefix("llama")
    rows: list[dict[str, Any]] = []
    for number in range(1 if options.quick else options.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            for found in measure({**config, "kind": kind}):
                rows.append({"kind": kind, "round": number, **found})
            print(f"round {number}: {kind}", file=sys.stderr, flush=True)
            if options.json:
                write(options.json, name, options.device, config, rows, summarize(rows, model))
    print(show(summarize(rows, model)["kinds"]))


def measure(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What rank 0 of one configuration printed, for each length."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={config['ranks']}", "-m", "benchmarks.tide.worker", json.dumps(config),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environment |= ENVIRONMENT.get(config["kind"], {})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(FOUND)]
    return [json.loads(line.removeprefix(FOUND)) for line in lines]


if __name__ == "__main__":
    main()
