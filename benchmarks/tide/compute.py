"""The models of `benchmarks.tide` on one device, whole and in bf16: a step with nothing beside it.

    python -m benchmarks.tide.compute [--model llama70b] [--steps 12] [--json FILE]

The workloads are those of the result files that `benchmarks.tide.scale` predicts, read from there: same
layers, same lengths, same recomputation. Nothing is sharded, gathered, cast or reduced, so what a pass
takes here is what its own kernels and the gaps between them take: an input of the scale model that owes
nothing to what it predicts. Each model runs in a process of its own.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.tide.models import Workload, build
from benchmarks.tide.trace import trace
from parallel.blocks import find_blocks
from parallel.recompute import recompute
from parallel.weights import materialize

FILES = ("tide-2xH200", "tide-8b-2xH200", "tide-qwen3_30b_a3b-2xH200", "tide-wan22-2xH200")
"""Of `benchmarks/results`."""
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """Measure every workload, and write what is there after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--file", choices=FILES, action="append", help="all of them")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    spawning = multiprocessing.get_context("spawn")
    for file in options.file or FILES:
        config = json.loads((RESULTS / f"{file}.json").read_text())["config"]
        with spawning.Pool(1) as pool:
            found = pool.apply(measure, (config, options.device, options.steps))
        rows += [{"file": file, **row} for row in found]
        for row in rows[-len(found) :]:
            ms = 1000 * statistics.median(row["passes"])
            print(f"{file}, {row['length']} tokens: {ms:.1f} ms", flush=True)
        if options.json:
            kept = {"steps": options.steps, "files": list(options.file or FILES)}
            results.write(options.json, "tide.compute", options.device, kept, rows, {})


def measure(config: dict[str, Any], kind: str, steps: int) -> list[dict[str, Any]]:
    """Seconds of forward and backward pass by length, and on a GPU the kernels of a step."""
    device = torch.zeros(0, device=kind).device
    work = whole(config, device)
    rows = []
    for length in config["lengths"]:
        torch.manual_seed(length)
        step = partial(passes, work, config["batch"], length, device)
        for _ in range(config.get("warmup", 2)):
            finish(step())
        begun = [step() for _ in range(steps)]  # the host runs ahead, as in training
        row: dict[str, Any] = {"length": length, "passes": [finish(marks) for marks in begun]}
        if kind == "cuda":
            row |= trace(lambda step=step: finish(step()))  # type: ignore[misc]
            row["memory"] = torch.cuda.max_memory_allocated()
        rows.append(row)
    return rows


def whole(config: dict[str, Any], device: torch.device) -> Workload:
    """The workload with weights in bf16, as FSDP2 gathers them; buffers stay as they are."""
    work = build(config)
    for _, block in find_blocks(work.model):
        recompute(block, config.get("parallel", {}).get("activation_checkpointing", "none"))
    materialize(work.model, device, work.init, seed=0)
    for parameter in work.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return work


def passes(work: Workload, batch: int, length: int, device: torch.device) -> list[Any]:
    """Both passes of one step: its begin and its end. Gradients are dropped."""
    drawn = work.draw(batch, length, device)
    marks = [mark(device)]
    work.loss(work.model, drawn).backward()
    marks.append(mark(device))
    work.model.zero_grad(set_to_none=True)
    return marks


def mark(device: torch.device) -> Any:
    """A moment: of the device's stream, or of the clock."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def finish(marks: list[Any]) -> float:
    """Seconds between two moments."""
    begin, end = marks
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


if __name__ == "__main__":
    main()
