"""One rank of one configuration, under torchrun; rank 0 prints a line of JSON for each length.

torchrun ... -m benchmarks.tide.worker '{"kind": "tide", "model": "tiny", ...}'
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tide.copies import Copies
from benchmarks.tide.kinds import ON_CPU, ON_GPUS
from benchmarks.tide.models import Workload, build
from benchmarks.tide.trace import trace
from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import Tide
from parallel.weights import materialize

FOUND = "found: "


def main() -> None:
    """Train a few steps of each length: the first ones warm up, the others are timed, one is traced.

    On the CPU, bytes are counted instead.
    """
    options = json.loads(sys.argv[1])
    gpu, batch = options["device"] == "cuda", options["batch"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None
    )
    torch.set_num_threads(1)
    size, first = dist.get_world_size(), dist.get_rank() == 0
    work = _build(options, device, size)
    model = work.model
    used = (ON_GPUS if gpu else ON_CPU)[options["kind"]](model, options["node_size"], gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=gpu or None)
    for number, length in enumerate(options["lengths"]):
        torch.manual_seed(1000 * number + dist.get_rank())
        losses: list[torch.Tensor] = []
        step = partial(_step, work, optimizer, partial(work.draw, batch, length, device), losses)
        warmup = [_finish(step()) for _ in range(options.get("warmup", 2))]
        dist.barrier()
        # Nobody waits between steps: the host prepares the next one while this one is under way.
        begun = [step() for _ in range(options["steps"])]
        times = [_finish(each) for each in begun]
        found: dict[str, Any] = {"length": length, "warmup": [t["step"] for t in warmup]}
        found |= {key: [t[key] for t in times] for key in times[0]}
        found["memory"] = _memory(used, gpu)
        if not gpu:
            copies = Copies(size)
            for transport in (SharedMemory, PointToPoint):
                transport.put = copies.watch(transport.put)  # type: ignore[method-assign]
            with copies:
                step()
            found["bytes"] = copies.bytes
        elif first:
            found |= trace(partial(_whole, step), options.get("timeline"))
        else:
            _finish(step())
        found["losses"] = [float(loss) for loss in losses]
        if first:
            print("\n" + FOUND + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _build(options: Any, device: torch.device, size: int) -> Workload:
    work = build(options)
    parallel = ParallelConfig(
        param_dtype="bfloat16", reduce_dtype="float32", **options.get("parallel", {})
    )
    parallelize(work.model, build_mesh(mesh_shape(parallel, size), device.type), parallel)
    materialize(work.model, device, work.init, seed=0)
    return work


@dataclass
class Begun:
    """A step that has been asked for; on a GPU it may still be under way."""

    marks: list[Any]
    """Its begin, the end of its passes and its end."""
    host: float
    """Seconds that the host took for the passes."""


def _step(work: Workload, optimizer: Any, draw: Any, losses: list[torch.Tensor]) -> Begun:
    batch = draw()
    gpu = next(iter(batch.values())).is_cuda
    marks = [_mark(gpu)]
    begin = time.perf_counter()
    loss = work.loss(work.model, batch)
    loss.backward()
    host = time.perf_counter() - begin
    marks.append(_mark(gpu))
    torch.nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    marks.append(_mark(gpu))
    return Begun(marks, host)


def _mark(gpu: bool) -> Any:
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _finish(begun: Begun) -> dict[str, float]:
    """Seconds of the whole step, of its forward and backward passes, and of the host for these."""
    begin, middle, end = begun.marks
    if isinstance(end, float):
        return {"step": end - begin, "passes": middle - begin, "host": begun.host}
    end.synchronize()
    step, passes = begin.elapsed_time(end) / 1000, begin.elapsed_time(middle) / 1000
    return {"step": step, "passes": passes, "host": begun.host}


def _whole(step: Any) -> None:
    _finish(step())


def _memory(used: Tide | None, gpu: bool) -> dict[str, int]:
    memory = {}
    if gpu:
        free, total = torch.cuda.mem_get_info()
        memory = {"device": total - free, "allocator": torch.cuda.max_memory_allocated()}
    if used is not None:
        memory["slots"] = sum(pool.slot_nbytes for pool in used.pools)
        memory["staging"] = sum(pool.staging_nbytes for pool in used.pools)
    return memory


if __name__ == "__main__":
    main()
