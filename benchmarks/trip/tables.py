"""An item table that FSDP2 gathers against one that ranks divide by rows: memory and time of a step.

    python -m benchmarks.trip.tables --ranks 2 --json benchmarks/results/trip-tables-cpu-2.json

Ranks are processes of this machine; `--device cuda` gives each a GPU. A step looks up numbers that are
drawn anew, has a loss on their rows, and ends with AdamW. Each way has processes of its own. Memory is
the most that a rank held from the first step on: on the CPU its resident set, with torch, its libraries
and, where rows are divided, torchrec.
"""

import argparse
import os
import tempfile
import time
from importlib import metadata
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from benchmarks.results import write
from models.trip.table import ItemTable
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize


class Model(nn.Module):
    """A table and a layer over what is looked up."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.table, self.layer = ItemTable(rows, size), nn.Linear(size, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A loss."""
        loss: torch.Tensor = self.layer(self.table(ids)).square().mean()
        return loss


def peak(device: torch.device) -> int:
    """Bytes since `forget`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget(device: torch.device) -> None:
    """Begin to look for a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def one_rank(rank: int, way: str, store: str, found: Any, options: argparse.Namespace) -> None:
    """Train a few steps; rank by rank, puts its peak and the seconds of its steps into `found`."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{store}", rank=rank, world_size=options.ranks,
    )  # fmt: skip
    device = torch.device(options.device)
    with torch.device("meta"):
        model = Model(options.rows, options.size)
    config = ParallelConfig(tables=way)
    mesh = build_mesh(mesh_shape(config, options.ranks), options.device)
    parallelize(model, mesh, config, tables=[model.table] if way == "rows" else [])
    materialize(model, device, lambda m: m.reset_parameters(), seed=0)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator(device).manual_seed(rank)
    seconds = []
    forget(device)
    for _ in range(options.steps):
        ids = torch.randint(options.rows, (options.lookups,), device=device, generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    found.put({"peak": peak(device), "seconds": seconds})
    dist.barrier()
    os._exit(0)


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """All ranks of one way."""
    context = multiprocessing.get_context("spawn")
    found: SimpleQueue[dict[str, Any]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=one_rank, args=(rank, way, f"{folder}/store", found, options))
            for rank in range(options.ranks)
        ]
        for rank in ranks:
            rank.start()
        each = [found.get() for _ in ranks]
        for rank in ranks:
            rank.join()
    steps = sorted(max(times) for times in zip(*(r["seconds"] for r in each), strict=True))
    return {
        "peak_GiB": max(r["peak"] for r in each) / 2**30,
        "median_s": steps[len(steps) // 2],
        "ranks": each,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=32_768, help="numbers a rank and step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    ways = {way: measure(way, options) for way in ("fsdp", "rows")}
    for way, of in ways.items():
        print(f"{way:5} {of['peak_GiB']:.2f} GiB {1000 * of['median_s']:.0f} ms")
    config = {**vars(options), "json": options.json.name}
    config["torchrec"] = metadata.version("torchrec")
    summary = {
        f"{way}_{key}": of[key] for way, of in ways.items() for key in ("peak_GiB", "median_s")
    }
    rows = [{"way": way, **of} for way, of in ways.items()]
    write(options.json, "trip.tables", options.device, config, rows, summary)


if __name__ == "__main__":
    main()
