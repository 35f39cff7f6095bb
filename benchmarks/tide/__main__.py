"""FSDP2 on torch's collectives and on TIDE, side by side.

    python -m benchmarks.tide --device cpu [--ranks N] [--node-size N] [--quick] [--json FILE]
    python -m benchmarks.tide --device cuda [--ranks N] [--lengths 1024 2048] [--quick] [--json FILE]

Separate processes, in turn. On the CPU the bytes are the figures to look at: how many a step reads and
writes, by cause, and how much memory slots and staging take; its times are no evidence for GPUs. On
GPUs it times four layers of the shape of Llama 3.1 70B, the forward and backward passes by themselves
and the whole step, and takes the kernels of one step down.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.tide.copies import LAYOUT, ORDER
from benchmarks.tide.kinds import ENVIRONMENT, ON_CPU, ON_GPUS
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
    if options.device == "cpu":
        config |= {"model": options.model or "tiny", "batch": 2, "lengths": [128]}
        name, show, all_kinds = "tide-cpu", table, list(ON_CPU)
    else:
        config |= {
            "model": options.model or "llama70b", "batch": 1, "warmup": 4,
            "lengths": options.lengths or [1024, 2048, 4096, 8192],
            "changes": {"vocab_size": 32000} | depth,
        }  # fmt: skip
        name, show, all_kinds = "tide-gpu", times, list(ON_GPUS)
    kinds = options.kinds or all_kinds
    rows: list[dict[str, Any]] = []
    for number in range(1 if options.quick else options.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            for found in measure({**config, "kind": kind}):
                rows.append({"kind": kind, "round": number, **found})
            print(f"round {number}: {kind}", file=sys.stderr, flush=True)
            if options.json:
                write(options.json, name, options.device, config, rows, summarize(rows))
    print(show(summarize(rows)))


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


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind (and length): medians and spread of all rounds, memory, bytes or kernels."""
    summary: dict[str, Any] = {}
    several = len({row["length"] for row in rows}) > 1
    for kind, length in dict.fromkeys((row["kind"], row["length"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["length"]) == (kind, length)]
        each: dict[str, Any] = {"memory": mine[-1]["memory"]}
        for key in ("step", "passes", "host"):
            seconds = sorted(s for row in mine for s in row.get(key, ()))
            if seconds:
                low, high = (seconds[int(share * (len(seconds) - 1))] for share in (0.1, 0.9))
                each[f"{key}_ms"] = [
                    round(1000 * s, 2) for s in (statistics.median(seconds), low, high)
                ]
        each |= {key: mine[-1][key] for key in KEPT if key in mine[-1]}
        summary[f"{kind}, {length} tokens" if several else kind] = each
    return summary


KEPT = ("bytes", "kernels", "copies", "losses")
"""Of the last round."""
LAYOUT_KERNELS = ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in")
REDUCE_KERNELS = ("ReduceScatter", "chunk_cat", "_add_up_kernel")


def spent(kernels: dict[str, list[float]], words: Sequence[str]) -> tuple[float, float]:
    """Milliseconds of the kernels with one of `words` in their names: summed, and weighted."""
    found = [ms for key, ms in kernels.items() if any(word in key for word in words)]
    return sum(ms[0] for ms in found), sum(ms[1] for ms in found)


def times(summary: dict[str, Any]) -> str:
    """GPU figures in Markdown: ms, and GiB of the device's memory as the driver sees it."""
    head = (
        "", "step", "forward and backward", "layout kernels",
        "reduce-scatter kernels (by share of the SMs)", "device memory", "of it slots and staging",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, each in summary.items():
        kernels = each.get("kernels", {})
        layout, reduce = (spent(kernels, words) for words in (LAYOUT_KERNELS, REDUCE_KERNELS))
        memory = each["memory"]
        own = memory.get("slots", 0) + memory.get("staging", 0)
        step, low, high = each["step_ms"]
        lines.append(
            f"| {name} | {step:.1f} ({low:.1f}-{high:.1f}) ms | {each['passes_ms'][0]:.1f} ms "
            f"| {layout[0]:.1f} ms | {reduce[0]:.1f} ({reduce[1]:.1f}) ms "
            f"| {memory['device'] / 2**30:.1f} GiB | {own / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def table(summary: dict[str, Any]) -> str:
    """In Markdown, MB = 10^6 bytes, of one rank."""
    kinds = list(summary)
    lines = [
        "| of one rank in a step | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]

    def line(name: str, values: list[int | None]) -> str:
        shown = ["-" if value is None else f"{value / 1e6:.2f} MB" for value in values]
        return f"| {name} | " + " | ".join(shown) + " |"

    for cause in ORDER:
        lines.append(line(cause, [summary[k]["bytes"].get(cause, 0) for k in kinds]))
    total = [sum(summary[k]["bytes"].get(c, 0) for c in LAYOUT) for k in kinds]
    lines.append(line("**to change the layout, all told**", list(total)))
    for part in ("slots", "staging"):
        lines.append(line(f"memory of {part}", [summary[k]["memory"].get(part) for k in kinds]))
    times = [f"{summary[k]['step_ms'][0]:.0f} ms" for k in kinds]
    lines.append("| step (no evidence for GPUs) | " + " | ".join(times) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
