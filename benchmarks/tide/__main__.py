"""FSDP2 on torch's collectives and on TIDE, side by side.

    python -m benchmarks.tide --device cpu [--ranks N] [--node-size N] [--quick] [--json FILE]

Separate processes, in turn. On the CPU the bytes are the figures to look at: how many a step reads and
writes, by cause, and how much memory slots and staging take. Its times are no evidence for GPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.tide.copies import LAYOUT, ORDER
from benchmarks.tide.worker import KINDS

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    """Run every kind in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--node-size", type=int, default=None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = {
        "model": options.model, "batch": 2, "length": 128, "ranks": options.ranks,
        "node_size": options.node_size or options.ranks,
        "steps": 2 if options.quick else options.steps,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for number in range(1 if options.quick else options.rounds):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            rows.append({"kind": kind, "round": number, **measure(kind, config)})
            print(f"round {number}: {kind} done", file=sys.stderr, flush=True)
        if options.json:
            write(options.json, "tide-cpu", "cpu", config, rows, summarize(rows))
    print(table(summarize(rows)))


def measure(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of one configuration printed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={config['ranks']}", "-m", "benchmarks.tide.worker",
        json.dumps({"kind": kind, "device": "cpu", **config}),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"warmup"'))
    found: dict[str, Any] = json.loads(line)
    return found


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind: the bytes (the same in every round), memory, the median step and its spread."""
    summary = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        seconds = sorted(s for row in mine for s in row["seconds"])
        summary[kind] = {
            "bytes": mine[0]["bytes"],
            "memory": mine[0]["memory"],
            "ms_per_step": round(1000 * statistics.median(seconds), 1),
            "p10_p90_ms": [
                round(1000 * seconds[int(share * (len(seconds) - 1))], 1) for share in (0.1, 0.9)
            ],
        }
    return summary


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
    times = [f"{summary[k]['ms_per_step']:.0f} ms" for k in kinds]
    lines.append("| step (no evidence for GPUs) | " + " | ".join(times) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
