"""One rank of one configuration, under torchrun; rank 0 prints one JSON line.

torchrun ... -m benchmarks.tide.worker '{"kind": "tide", "model": "tiny", ...}'
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from benchmarks.tide.copies import Copies
from collectives.config import CollectivesConfig
from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import use_tide
from parallel.weights import materialize

PRESETS = Path(__file__).resolve().parent.parent.parent / "configs" / "model"
KINDS = ("stock", "tide", "tide, slot reuse")


def main() -> None:
    """Train a few steps: the first ones warm up, the others are timed; on the CPU, one is counted."""
    options = json.loads(sys.argv[1])
    gpu, batch, length = options["device"] == "cuda", options["batch"], options["length"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None
    )
    torch.set_num_threads(1)
    size = dist.get_world_size()
    values: Any = OmegaConf.load(PRESETS / f"{options['model']}.yaml")
    values = {**values, "attention": "sdpa", **options.get("changes", {})}
    config = CausalLMConfig(**values)
    vocabulary = config.vocab_size or 257
    model: Any = build_causal_lm(config, transformers_config(config, vocabulary))
    parallel = ParallelConfig(param_dtype="bfloat16", reduce_dtype="float32")
    parallelize(model, build_mesh(mesh_shape(parallel, size), device.type), parallel)
    materialize(model, device, partial(init_weights, model), seed=0)
    tide = None
    if options["kind"] != "stock":
        reuse = True if options["kind"] == "tide, slot reuse" else None
        settings = CollectivesConfig(
            transport="symm_mem" if gpu else "auto", slot_reuse=reuse, slots=options.get("slots")
        )
        tide = use_tide(model, settings, options["node_size"])
        assert not tide.stayed, tide.stayed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=gpu or None)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(vocabulary, (batch, length), device=device)
    losses, backward_seconds = [], []

    def step() -> float:
        if gpu:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
        for mark in marks[:1]:
            mark.record()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = next_token_loss(logits[:, :-1], tokens[:, 1:])
        (loss / (batch * (length - 1))).backward()
        for mark in marks[1:]:
            mark.record()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / (batch * (length - 1)))
        if gpu:
            torch.cuda.synchronize()
            backward_seconds.append(marks[0].elapsed_time(marks[1]) / 1000)
        return time.perf_counter() - begin

    warmup = [step() for _ in range(options.get("warmup", 2))]
    seconds = [step() for _ in range(options["steps"])]
    found: dict[str, Any] = {"warmup": warmup, "seconds": seconds, "losses": losses, "memory": {}}
    if not gpu:
        copies = Copies(size)
        for transport in (SharedMemory, PointToPoint):
            transport.put = copies.watch(transport.put)  # type: ignore[method-assign]
        with copies:
            step()
        found["bytes"] = copies.bytes
    else:
        free, total = torch.cuda.mem_get_info()
        found["memory"] = {"device": total - free, "allocator": torch.cuda.max_memory_allocated()}
        found["backward_seconds"] = backward_seconds[len(warmup) :]
        if options.get("trace") and dist.get_rank() == 0:
            found["kernels"] = kernels(step, options.get("timeline"))
        elif options.get("trace"):
            step()
    if tide is not None:
        found["memory"]["slots"] = sum(pool.slot_nbytes for pool in tide.pools)
        found["memory"]["staging"] = sum(pool.staging_nbytes for pool in tide.pools)
    if dist.get_rank() == 0:
        print("\n" + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def kernels(step: Callable[[], float], timeline: str | None) -> dict[str, float]:
    """Milliseconds of each kernel and copy in one step, the largest; `timeline`: a file to write."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[kinds.CUDA, kinds.CPU] if timeline else [kinds.CUDA]
    ) as profile:
        step()
    if timeline:
        profile.export_chrome_trace(timeline)
    times = {e.key[:90]: e.self_device_time_total / 1000 for e in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:40])


if __name__ == "__main__":
    main()
