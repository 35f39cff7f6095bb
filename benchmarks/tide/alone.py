"""The collectives by themselves, on GPUs: bandwidth by size and number of tensors, and what a matrix
product loses beside them.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.tide.alone --json FILE

Torch's are what FSDP2 does: pack, gather and copy out, or pack, upcast and scatter. Bandwidth is that of
a ring: bytes of the whole output (all-gather) or of the whole fp32 input (reduce-scatter, so that equal
figures are equal times), times (ranks - 1) / ranks, over the time. What is `bare`
is of shards that are cast already, without copies out. The products are of one wave: they have as many
tiles as there are multiprocessors.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import write
from benchmarks.tide.ranks import join
from collectives.symmetric.fabric import connect
from collectives.tide.all_gather import Gather
from collectives.tide.layout import cut, make_layout
from collectives.tide.reduce_scatter import ReduceScatter
from collectives.tide.slots import Slot, channels_of

SIZES = [1 << power for power in (20, 22, 24, 26, 28, 30, 31)]
"""Bytes of the gathered tensors in bf16."""
COUNTS = (1, 9, 64, 256)
REPEATS = 7
AHEAD = 20_000_000
"""Cycles that the device waits while the host calls: about 10 ms."""
PRODUCT = (2048, 8192, 2816)
"""Of 128 tiles of 256 x 176 on 132 multiprocessors."""
PRODUCTS = 8


def main() -> None:
    """Measure everything; rank 0 writes it down."""
    parser = argparse.ArgumentParser(description="The collectives by themselves, on GPUs.")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    device = join("cuda")
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    fabric = connect(group, size, 60.0, device=device)
    slot = Slot(fabric, fabric.allocate(max(SIZES) + 256 * max(COUNTS)), 0)
    scatter = ReduceScatter(fabric, 1 << 20, channels_of(1))
    rows: list[dict[str, Any]] = []
    for nbytes in SIZES:
        for count in COUNTS:
            shapes = [(nbytes // 2 // count // 64, 64)] * count
            timed = {
                "gather, torch": gather_torch(shapes, device),
                "gather, tide": gather_tide(shapes, slot, device),
                "gather, torch, bare": gather_torch_bare(shapes, device),
                "gather, tide, bare": gather_tide(shapes, slot, device, cast_before=True),
                "scatter, torch": scatter_torch(shapes, device),
                "scatter, tide": scatter_tide(shapes, slot, scatter, device),
            }
            for name, action in timed.items():
                seconds = clock(action)
                moved = nbytes * (2 if "scatter" in name else 1) * (size - 1) / size
                rows.append({
                    "what": name, "nbytes": nbytes, "tensors": count,
                    "ms": round(1000 * seconds, 4), "GB/s": round(moved / seconds / 1e9, 1),
                })  # fmt: skip
            del timed
            torch.cuda.empty_cache()
    summary = {"beside products": beside_products(slot, scatter, device)}
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        print(summary)
        config = {"ranks": size, "repeats": REPEATS, "product": PRODUCT, "products": PRODUCTS}
        write(options.json, "tide.alone", "cuda", config, rows, summary)
    torch.cuda.synchronize()
    dist.barrier()
    fabric.close()
    dist.destroy_process_group()


def clock(action: Callable[[], None]) -> float:
    """Seconds of one call on the device, the median, all ranks beginning together.

    The device has something to do while it is given its work, as in training: the host's time is hidden.
    """
    found = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found[2:])


def gather_torch(shapes: list[tuple[int, int]], device: torch.device) -> Callable[[], None]:
    """Cast and pack, gather, copy out: what FSDP2 does."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shards = [torch.randn(-(-r // size) * c, device=device) for r, c in shapes]
    numels = [shard.numel() for shard in shards]
    flat = torch.empty(sum(numels) * size, dtype=torch.bfloat16, device=device)
    wholes = [torch.empty(size, n, dtype=torch.bfloat16, device=device) for n in numels]

    def action() -> None:
        own = torch.empty(sum(numels), dtype=torch.bfloat16, device=device)
        torch._foreach_copy_(list(own.split(numels)), shards)
        own_part = flat.view(size, -1)[rank]
        torch._foreach_copy_(list(own_part.split(numels)), list(own.split(numels)))
        dist.all_gather_into_tensor(flat, own_part)
        torch.split_with_sizes_copy(flat.view(size, -1), numels, dim=1, out=wholes)

    return action


def gather_torch_bare(shapes: list[tuple[int, int]], device: torch.device) -> Callable[[], None]:
    """The collective by itself, in place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = sum(-(-r // size) * size * c for r, c in shapes)
    flat = torch.zeros(whole, dtype=torch.bfloat16, device=device)
    own = flat.view(size, -1)[rank]
    return lambda: void(dist.all_gather_into_tensor(flat, own))


def gather_tide(
    shapes: list[tuple[int, int]], slot: Slot, device: torch.device, cast_before: bool = False
) -> Callable[[], None]:
    """Cast, if that was not done before, and put; the gathered bytes are where they belong."""
    size = dist.get_world_size()
    layout = make_layout(size, [(cut(shape, 0, size), torch.bfloat16) for shape in shapes])
    gather = Gather(slot, layout, keep=cast_before)
    shards = [torch.randn(c.shard_numel, device=device) for c in layout.cuts]
    if cast_before:
        gather.cast(shards)

    def action() -> None:
        gather.start(None if cast_before else shards, "tensors")
        gather.wait()
        slot.release()

    return action


def scatter_torch(shapes: list[tuple[int, int]], device: torch.device) -> Callable[[], None]:
    """Pack into fp32 and scatter: what FSDP2 does."""
    size = dist.get_world_size()
    grads = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    whole = sum(-(-r // size) * size * c for r, c in shapes)
    packed = torch.empty(size, whole // size, device=device)
    output = torch.empty(whole // size, device=device)

    def action() -> None:
        torch._chunk_cat(grads, dim=0, num_chunks=size, out=packed)
        dist.reduce_scatter_tensor(output, packed.view(-1), op=dist.ReduceOp.AVG)

    return action


def scatter_tide(
    shapes: list[tuple[int, int]], slot: Slot, scatter: ReduceScatter, device: torch.device
) -> Callable[[], None]:
    """Put and sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    cuts = [cut(shape, 0, size) for shape in shapes]
    grads = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    targets: list[Tensor] = [torch.empty(c.held(rank), device=device) for c in cuts]

    def action() -> None:
        scatter(list(grads), cuts, targets, divide=float(size), slot=slot, tenant="tensors")
        torch.cuda.current_stream().wait_stream(scatter.fabric.local.beside)

    return action


def beside_products(slot: Slot, scatter: ReduceScatter, device: torch.device) -> dict[str, float]:
    """Milliseconds of the products alone, and beside collectives that go on for as long."""
    rows, inner, columns = PRODUCT
    a = torch.randn(rows, inner, device=device).bfloat16()
    b = torch.randn(inner, columns, device=device).bfloat16()
    shapes = [(32768, 8192)]
    others: dict[str, Callable[[], None] | None] = {
        "alone": None,
        "gather, torch": gather_torch(shapes, device),
        "gather, tide": gather_tide(shapes, slot, device),
        "scatter, torch": scatter_torch(shapes, device),
        "scatter, tide": scatter_tide(shapes, slot, scatter, device),
    }
    flat = torch.empty(1 << 28, device=device)
    piece = torch.empty((1 << 28) // dist.get_world_size(), device=device)
    others["scatter, torch, without packing"] = lambda: void(
        dist.reduce_scatter_tensor(piece, flat)
    )
    side = torch.cuda.Stream(priority=-1)
    found = {}
    for name, other in others.items():
        times = []
        for _ in range(REPEATS + 2):
            torch.cuda.synchronize()
            dist.barrier()
            if other is not None:
                with torch.cuda.stream(side):
                    for _ in range(4):
                        other()
                torch.cuda._sleep(600_000)  # the collective is in full swing
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(PRODUCTS):
                a @ b
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found[name] = round(statistics.median(times[2:]), 4)
    return found


def void(_: Any) -> None:
    """Nothing, whatever is given."""


if __name__ == "__main__":
    main()
