"""Writes `docs/performance.md` from the files under `benchmarks/results/`: no figure is typed.

python -m benchmarks.performance
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.tide.__main__ import table, times

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"

HEAD = """\
# Performance

This page is written by `benchmarks/performance.py` from the files under `benchmarks/results/`, each
with the machine, the versions and the command that made it.

```bash
python -m benchmarks.performance
```
"""

TRUNK = """
## What the loop costs

The trainer beside the same model under plain FSDP2 in a short script
([benchmarks/plain_fsdp2.py](../benchmarks/plain_fsdp2.py)): separate processes, in turn, on the same
shape of batch and the same attention. The trainer's times include its reports, agreements between
ranks, the norm, clipping, the guard against non-finite steps, and reading data. Medians over all
intervals of all rounds; the overhead is their ratio, the noise the largest spread of one process.

```bash
python -m benchmarks.trunk --gpus 2
```

| model | GPUs | ms a step (plain / ours) | tokens/s | MFU | overhead | noise |
|---|---|---|---|---|---|---|
"""

TIDE = """
## What TIDE saves a rank from copying

Bytes that FSDP2's collectives read and write in one step of the tiny model, bf16 with fp32 sums,
on CPU ranks. Times on a CPU say nothing about GPUs; bytes do.
"""

GPU = """
## What TIDE saves on GPUs

Four layers of the shape of Llama 3.1 70B with a vocabulary of 32,000, bf16 with fp32 sums, AdamW and
clipping; separate processes. Forward and backward are timed by events, the step by the host with
10 % and 90 % quantiles; kernels are those of one step of rank 0, summed; device memory is what the
driver sees, slots included. Multicast is off.
"""


def trunk_row(result: dict[str, Any]) -> str:
    """One line of the table: a result file of `benchmarks.trunk`."""
    figures, config = result["summary"], result["config"]
    device = result["machine"]["device"].removeprefix("NVIDIA ")
    every = [row["seconds_per_interval"] for row in result["rows"]]
    spread = max((max(s) - min(s)) / min(s) for s in every)
    return (
        f"| {config['model']}, {config['batch']} x {config['length']:,} tokens a GPU "
        f"| {config['ranks']} {device} "
        f"| {figures['plain_ms_per_step']} / {figures['ours_ms_per_step']} "
        f"| {figures['plain_tokens_per_second']:,} / {figures['ours_tokens_per_second']:,} "
        f"| {100 * figures['plain_mfu']:.1f} % / {100 * figures['ours_mfu']:.1f} % "
        f"| {100 * figures['overhead']:+.2f} % | {100 * spread:.1f} % |"
    )


def tide_part(result: dict[str, Any]) -> str:
    """One table: a result file of `benchmarks.tide` on the CPU."""
    ranks, node_size = result["config"]["ranks"], result["config"]["node_size"]
    where = f"{ranks} ranks" + (f" on {ranks // node_size} nodes" if ranks > node_size else "")
    return f"\n{where}:\n\n```bash\n{result['command']}\n```\n\n{table(result['summary'])}\n"


def gpu_part(result: dict[str, Any]) -> str:
    """One table, and what of it is left: a result file of `benchmarks.tide` on GPUs."""
    summary, versions = result["summary"], result["versions"]
    ratios = []
    for name, each in summary.items():
        kind, _, length = name.partition(", ")
        if kind != "stock":
            stock = summary[f"stock, {length}"]
            passes = each["ms_forward_backward"] / stock["ms_forward_backward"]
            step = each["ms_per_step"] / stock["ms_per_step"]
            ratios.append(f"| {name} | {passes:.3f} | {step:.3f} |")
    where = (
        f"{result['machine']['count']} {result['machine']['device']}, torch {versions['torch']}, "
        f"NCCL {versions['nccl']}, {result['date']}"
    )
    head = "| of torch's collectives | forward and backward | step |\n|---|---|---|"
    return (
        f"\n{where}:\n\n```bash\n{result['command']}\n```\n\n{times(summary)}\n\n{head}\n"
        + "\n".join(ratios) + "\n"
    )  # fmt: skip


def page() -> str:
    """The whole page."""
    results = [json.loads(f.read_text()) for f in sorted((ROOT / "benchmarks/results").glob("*"))]
    trunk = [r for r in results if r["name"] == "trunk"]
    versions = sorted(
        {f"torch {r['versions']['torch']}, NCCL {r['versions']['nccl']}" for r in trunk}
    )
    rows = "\n".join(trunk_row(r) for r in trunk)
    measured = f"Measured with {'; '.join(versions)}; bf16, fp32 gradients, eager."
    tide = "".join(tide_part(r) for r in results if r["name"] == "tide-cpu")
    gpus = "".join(gpu_part(r) for r in results if r["name"] == "tide-gpu")
    return f"{HEAD}{TRUNK}{rows}\n\n{measured}\n{GPU}{gpus}{TIDE}{tide}"


if __name__ == "__main__":
    PAGE.write_text(page())
