"""Writes `docs/performance.md` from the files under `benchmarks/results/`: no figure is typed.

python -m benchmarks.performance
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.tide.scale.page import scale_part
from benchmarks.tide.tables import losses_apart, table, times

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

RUNS = """
## Plans against runs

What `trainer.dry_run=true` says, and what the same run then took, by `python -m benchmarks.runs`. Memory
is the most that was in tensors on a rank, slots included; what the caching allocator had reserved for
them is beside it. The four shapes of the section below, on TIDE and on torch's collectives, are a test
(`tests/trainer/dry_run/test_forecast.py`): there, too, all plans are within 10 % of what GPUs took.
Times are guesses from shares of the peak, and say little where the host cannot keep up with the GPU, as
with small micro-batches of a small model.

| run | GPUs | memory, planned / taken | reserved | step, planned / taken | mfu |
|---|---|---|---|---|---|
"""

SAVING = """
A checkpoint after 60 of 120 steps, written in the background while training goes on, and the same run
without (another one after the last step is not in these times):

| run | GPUs | without | with | pauses in all | more | a checkpoint is written in |
|---|---|---|---|---|---|---|
"""
GPU = """
## What TIDE saves on GPUs

bf16 with fp32 sums, AdamW and clipping; a process for each kind, in turn and back; random tokens, new
ones every step; the host runs ahead of the devices, as in training. Forward and backward passes are
timed by events, the step with 10 % and 90 % quantiles; kernels are those of one step of rank 0, summed,
and weighted by the share of the multiprocessors that their grids can take; device memory is what the
driver sees, slots included. Multicast is off.

![Time of the passes by kind and tokens](pictures/tide-passes.svg)

![Time of the passes by model](pictures/tide-models.svg)

`stock, symmetric memory` is FSDP2 with its all-gather in NCCL's symmetric memory by copy engines,
rebuilt for torch 2.11, which has no switch for it. `tide` casts shards ahead and stages gradients in
slots; `staging` has memory of its own for these; the other kinds serve one collective only. With
memory of its own for gradients, and with one collective only, 1,024 tokens are slower than torch and
uneven from step to step: the default is not, and the cause was not looked for.
"""

FALLS_SHORT = """
### What falls short, and why

- **8,192 tokens**: aimed at 0.90 of torch's (and of FSDP2 with symmetric memory), 0.92 (0.93) measured.
  A trace of the step shows matrix products and attention busy for all but about 18 of 366 ms. The rest
  is the start, where nothing can hide the first layer's 2.2 ms on the wire and the host's way to it (5
  to 7 ms in all), the end, where nothing hides the last layer's gradients (4 to 6 ms, among it waiting
  for the slower of the two ranks), and 5 ms where sums and products take turns.
- **Sums beside products**: aimed at +7 % for a product of one wave, see the table below. The sum reads
  and writes 8 bytes an element and needs the memory's full rate; a product of one wave needs every
  multiprocessor, and those that form sums are not to be had meanwhile. Tried: 16 to 132 long-lived
  programs, thousands of short ones, streams of lower and of higher priority. Long-lived programs on
  some of the multiprocessors hold up the whole product; short ones at equal priority go before
  whatever is launched after them; at lower priority they starve, and the next layer's weights come
  late (66 instead of 58 ms at 1,024 tokens).
- **Kernels of the reduce-scatter**: aimed at 1/12.5 of torch's time and a quarter when weighted; 1/8
  and 0.30 measured. They are the sums alone; at the 3.6 TB/s that they reach by themselves they
  would take 4.4 ms a step, and beside the layers' own traffic it is 5.4 ms or more.
- **Bandwidth of a whole gather**: aimed at 350 GB/s from 64 MB on and 375 from 256 MB on. The puts
  themselves run at 370 to 395 GB/s from 50 MB on (bytes and times of the copies are in the result
  files), a whole gather of shards that are cast already at 375 of 2 GiB, 360 of 1 GiB, which is about a
  layer of the 70B model, 290 of 256 MiB and 200 of 64 MiB: about 0.1 ms go into waiting for the slot,
  starting the copies, and the flags. With the cast, whose first portion nothing can leave before,
  330 GB/s of 1 GiB. Torch's own, bare, is at 285 and 250, and with its copies at 163 and 147.
- **1,024 tokens**: aimed at 0.58, 0.586 measured for the passes. The optimizer and the norm, the same
  24 ms for both, make that 0.67 of the whole step. At 2,048 tokens 0.74 was aimed at, 0.73 measured, and
  0.76 of FSDP2 with symmetric memory, 0.77 measured.
- **Memory**: below both in the 70B shape and the mixture of experts; 1 to 4 GiB above torch's for the 8B
  and the video model, whose weights are small beside their activations: slots, and shards cast ahead
  (`collectives.cast_ahead=false` gives 2 bytes a parameter of the shard back).
- **Two GPUs are the worst case for sums and casts**: what a rank casts and sums shrinks with the
  number of ranks.
"""

TITLES = {
    "llama70b": "The shape of Llama 3.1 70B with a vocabulary of 32,000",
    "llama8b": "The shape of Llama 3.1 8B",
    "qwen3_30b_a3b": "The shape of Qwen3-30B-A3B, 128 experts",
    "wan22": "The shape of the video transformer of Wan2.2-A14B",
}

ALONE = """
## The collectives by themselves

Including what FSDP2 does around them: casts, packing, copying out, sums. Bandwidth is that of a ring,
for the reduce-scatter in terms of torch's fp32, so that equal figures are equal times. Small groups are
slower by copy engines, since every tensor is a put of its own; that is why groups below 64 MiB, or of
many small tensors, stay on torch's collectives (`collectives.smallest`). `Bare` gathers are of shards
that are cast already, without copies out. Devices are given their work while they still have some, so
the host's time is hidden, as in training.

![Bandwidth by size](pictures/tide-alone.svg)
"""


HOST = """
What the host spends: a model of many layers too small to keep a GPU busy, the time until its passes are
queued, the fastest tenth of all steps (a machine's other work only ever adds). Aimed at no more than
60 microseconds a layer more than torch's.
"""

NETWORK = """
Between nodes, two GPUs standing for two nodes over NCCL's puts and signals: the gather beside a bare
loop of puts, aimed at 90 % of it. Each put waited for the arrival before it when this was measured;
puts are two ahead since, which was not measured yet. Pieces of 32 MiB instead of 8 MiB gave 80 %.
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


def run_rows(result: dict[str, Any]) -> str:
    """The lines of one result file of `benchmarks.runs`."""
    device = f"{result['config']['gpus']} {result['machine']['device'].removeprefix('NVIDIA ')}"
    return "\n".join(
        f"| {r['case']} | {device} | {r['planned_gib']:.1f} / {r['measured_gib']:.1f} GiB "
        f"| {r['reserved_gib']:.1f} GiB | {r['planned_ms']:,.0f} / {r['measured_ms']:,.0f} ms "
        f"| {100 * r['mfu']:.0f} % |"
        for r in result["rows"] if r["what"] == "plan"
    )  # fmt: skip


def saving_part(result: dict[str, Any]) -> str:
    """One table: what saving costs, if the result file has it."""
    kinds = [[r for r in result["rows"] if r["what"] == "saving" and bool(r["every"]) == saves]
             for saves in (False, True)]  # fmt: skip
    if not all(kinds):
        return ""
    without, with_ = (sum(r["ms_per_step"] for r in rows) / len(rows) for rows in kinds)
    pauses = sum(r["paused_ms"] for r in kinds[1]) / len(kinds[1])
    seconds = [s for r in kinds[1] for s in r["write_seconds"]]
    device = f"{result['config']['gpus']} {result['machine']['device'].removeprefix('NVIDIA ')}"
    return (
        f"| 1B | {device} | {without:.1f} ms | {with_:.1f} ms | {pauses:.0f} ms "
        f"| {100 * result['summary']['saving_overhead']:.1f} % | {max(seconds):.0f} s |\n\n"
        "A checkpoint that is due while one is still being written waits for it: here, where there are "
        f"fewer than\n{1000 * max(seconds) / without:.0f} steps between them.\n"
    )


def host_part(result: dict[str, Any]) -> str:
    """One table: a result file of `benchmarks.tide.host`."""
    summary = result["summary"]
    more = summary["us_added_per_layer"]
    rows = "\n".join(
        f"| {name} | {of['forward']:.1f} ms | {of['backward']:.1f} ms "
        f"| {of['forward_median']:.1f} / {of['backward_median']:.1f} ms |"
        for name, of in summary.items() if isinstance(of, dict)
    )  # fmt: skip
    return (
        f"{HOST}\n```bash\n{result['command']}\n```\n\n| {result['config']['num_layers']} layers "
        f"| forward | backward | medians |\n|---|---|---|---|\n{rows}\n\n"
        f"TIDE takes {abs(more):.0f} microseconds {'more' if more > 0 else 'less'} for a layer.\n"
    )


def network_part(result: dict[str, Any]) -> str:
    """One table: a result file of `benchmarks.tide.network`."""
    rows = result["rows"]
    lines = "\n".join(
        f"| {one['nbytes'] >> 20:,} MiB | {one['GB/s']:.0f} GB/s | {other['GB/s']:.0f} GB/s "
        f"| {100 * one['GB/s'] / other['GB/s']:.0f} % |"
        for one, other in zip(rows[::2], rows[1::2], strict=True)
    )
    return (
        f"{NETWORK}\n```bash\n{result['command']}\n```\n\n"
        f"| a shard of | gather | bare puts | |\n|---|---|---|---|\n{lines}\n"
    )


def tide_part(result: dict[str, Any]) -> str:
    """One table: a result file of `benchmarks.tide` on the CPU."""
    ranks, node_size = result["config"]["ranks"], result["config"]["node_size"]
    where = f"{ranks} ranks" + (f" on {ranks // node_size} nodes" if ranks > node_size else "")
    return (
        f"\n{where}:\n\n```bash\n{result['command']}\n```\n\n{table(result['summary']['kinds'])}\n"
    )


def gpu_part(result: dict[str, Any]) -> str:
    """One table, and what of it is left: a result file of `benchmarks.tide` on GPUs."""
    summary, versions = result["summary"]["kinds"], result["versions"]
    ratios = []
    for name, each in summary.items():
        kind, _, length = name.rpartition(", ")
        if kind != "stock":
            stock = summary[f"stock, {length}"]
            passes = each["passes_ms"][0] / stock["passes_ms"][0]
            step = each["step_ms"][0] / stock["step_ms"][0]
            ratios.append(f"| {name} | {passes:.3f} | {step:.3f} |")
    where = (
        f"{result['machine']['count']} {result['machine']['device']}, torch {versions['torch']}, "
        f"NCCL {versions['nccl']}, {result['date']}"
    )
    head = "| of torch's collectives | forward and backward | step |\n|---|---|---|"
    apart = losses_apart(result["rows"])
    losses = "; ".join(
        f"{kind} {100 * share:.3f} % over {steps} steps" for kind, (share, steps) in apart.items()
    )
    depth = result["config"]["changes"].get("num_layers")
    cut = f"{depth} layers" if depth else "whole, every block recomputed"
    return (
        f"\n### {TITLES[result['config']['model']]}, {cut}\n\n{where}:\n\n"
        f"```bash\n{result['command']}\n```\n\n{times(summary)}\n\n{head}\n"
        + "\n".join(ratios)
        + f"\n\nLosses are at most so far from those of torch's first round: {losses}.\n"
    )


def alone_part(result: dict[str, Any]) -> str:
    """Two tables: a result file of `benchmarks.tide.alone`."""
    rows = {(r["what"], r["nbytes"], r["tensors"]): r for r in result["rows"]}
    counts = sorted({count for _, _, count in rows})
    lines = [
        "| torch / TIDE, GB/s | " + " | ".join(f"{count} tensors" for count in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for what, pair in {
        "gather": ("gather, torch", "gather, tide"),
        "bare gather": ("gather, torch, bare", "gather, tide, bare"),
        "scatter": ("scatter, torch", "scatter, tide"),
    }.items():
        for nbytes in sorted({nbytes for _, nbytes, _ in rows}):
            figures = []
            for count in counts:
                torch_, tide = (rows[name, nbytes, count] for name in pair)
                figures.append(f"{torch_['GB/s']:.0f} / {tide['GB/s']:.0f}")
            lines.append(f"| {what} of {nbytes >> 20} MiB | " + " | ".join(figures) + " |")
    beside = result["summary"]["beside products"]
    lines += ["", "| eight matrix products of one wave | ms | |", "|---|---|---|"]
    for name, ms in beside.items():
        lines.append(f"| {name} | {ms:.2f} | {100 * (ms / beside['alone'] - 1):+.0f} % |")
    versions = result["versions"]
    where = f"torch {versions['torch']}, NCCL {versions['nccl']}, {result['date']}"
    return f"\n{where}:\n\n```bash\n{result['command']}\n```\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    results = [json.loads(f.read_text()) for f in sorted((ROOT / "benchmarks/results").glob("*"))]
    trunk = [r for r in results if r["name"] == "trunk"]
    versions = sorted(
        {f"torch {r['versions']['torch']}, NCCL {r['versions']['nccl']}" for r in trunk}
    )
    rows = "\n".join(trunk_row(r) for r in trunk)
    measured = f"Measured with {'; '.join(versions)}; bf16, fp32 gradients, eager."
    runs = "\n".join(filter(None, (run_rows(r) for r in results if r["name"] == "runs")))
    saving = "".join(saving_part(r) for r in results if r["name"] == "runs")
    runs += f"\n{SAVING}{saving}".rstrip() if saving else ""
    tide = "".join(tide_part(r) for r in results if r["name"] == "tide-cpu")
    gpus = "".join(gpu_part(r) for r in results if r["name"] == "tide-gpu")
    alone = "".join(alone_part(r) for r in results if r["name"] == "tide.alone")
    alone += "".join(host_part(r) for r in results if r["name"] == "tide.host")
    alone += "".join(network_part(r) for r in results if r["name"] == "tide.network")
    before = f"{HEAD}{TRUNK}{rows}\n\n{measured}\n{RUNS}{runs}\n"
    scale = "".join(scale_part(r) for r in results if r["name"] == "tide.scale")
    return f"{before}{GPU}{gpus}{FALLS_SHORT}{ALONE}{alone}{scale}{TIDE}{tide}"


if __name__ == "__main__":
    PAGE.write_text(page())
