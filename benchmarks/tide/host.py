"""What the host spends on a layer's collectives: torch's and TIDE's, in one process, in turn.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.tide.host --json FILE
    ... --device cpu      # shows that it runs; the figures are of the computation, too

A model of many small layers, so small that the device has hardly anything to do: the time until a
forward and a backward pass are queued is the host's own. Every step begins with idle devices. The
difference of two kinds, over the layers, is what one of them adds to a layer. Kinds are compared by the
fastest tenth of their steps: whatever else a machine does only ever adds to a host's time.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.results import write
from benchmarks.tide.kinds import one_ahead, tide
from benchmarks.tide.ranks import join
from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights, transformers_config
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import Tide
from parallel.weights import materialize

LAYERS, STEPS, ROUNDS = 24, 30, 3
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
}
KINDS: dict[str, Callable[[nn.Module, int, bool], Tide | None]] = {
    "torch, one ahead": one_ahead,
    "tide": tide(smallest=0),
}


def main() -> None:
    """Measure every kind some times; rank 0 writes it down."""
    parser = argparse.ArgumentParser(description="Host time of a layer's collectives.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args()
    steps, rounds = (3, 1) if options.quick else (STEPS, ROUNDS)
    torch.set_num_threads(1)
    device = join(options.device)
    rows = [
        {"what": name, "round": number, **measure(kind, device, steps)}
        for number in range(rounds)
        for name, kind in list(KINDS.items())[:: 1 if number % 2 == 0 else -1]
    ]
    if dist.get_rank() == 0:
        summary = summarize(rows)
        print(summary)
        config = {"ranks": dist.get_world_size(), "steps": steps, **SIZES}
        write(options.json, "tide.host", options.device, config, rows, summary)
    dist.barrier()
    dist.destroy_process_group()


def measure(
    kind: Callable[[nn.Module, int, bool], Tide | None], device: torch.device, steps: int
) -> dict[str, list[float]]:
    """Milliseconds of the host for the passes of each step, on this rank."""
    config = CausalLMConfig(vocab_size=1024, num_kv_heads=4, attention="sdpa", **SIZES)
    model = build_causal_lm(config, transformers_config(config, 1024))
    settings = ParallelConfig(param_dtype="bfloat16", reduce_dtype="float32")
    mesh = build_mesh(mesh_shape(settings, dist.get_world_size()), device.type)
    parallelize(model, mesh, settings)
    used = kind(model, dist.get_world_size(), device.type == "cuda")
    materialize(model, device, partial(init_weights, model), seed=0)
    ids = torch.randint(1024, (1, 64), device=device)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    gc.disable()
    for _ in range(steps + 5):
        dist.barrier()
        wait(device)
        begin = time.perf_counter()
        loss = model(input_ids=ids).logits.float().square().mean()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        found["forward"].append(1000 * (middle - begin))
        found["backward"].append(1000 * (end - middle))
        model.zero_grad()
    gc.enable()
    wait(device)
    if used is not None:
        used.close()
    return {name: [round(ms, 4) for ms in times[5:]] for name, times in found.items()}


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a pass, the fastest tenth and the median by kind; microseconds that TIDE adds to a
    layer."""
    found: dict[str, Any] = {name: {} for name in KINDS}
    for name, key in itertools.product(KINDS, ("forward", "backward")):
        times = [t for row in rows if row["what"] == name for t in row[key]]
        found[name][key] = round(statistics.quantiles(times, n=10)[0], 3)
        found[name][f"{key}_median"] = round(statistics.median(times), 3)
    stock, ours = (found[name]["forward"] + found[name]["backward"] for name in KINDS)
    return {**found, "us_added_per_layer": round(1000 * (ours - stock) / LAYERS, 1)}


if __name__ == "__main__":
    main()
