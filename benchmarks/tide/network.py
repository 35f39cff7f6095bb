"""What a gather between nodes reaches of what bare puts do, each rank a node of its own.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.tide.network --json FILE
    ... --device cpu      # over the network that stands for nodes in tests; shows that it runs

Bare is a loop over pieces, each put with a signal, without slots, credits or an order of who passes on
what: to one peer, and from one at the same time, as in the gather. Bandwidth is of one direction. Shards
are cast already. GPUs are given their work while they still have some, so the host's time is hidden.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results import write
from benchmarks.tide.alone import REPEATS
from benchmarks.tide.alone import clock as on_device
from benchmarks.tide.ranks import join
from collectives.symmetric.fabric import connect
from collectives.tide.all_gather import Gather
from collectives.tide.layout import cut, make_layout
from collectives.tide.rail import RAIL_CHANNELS, Rail
from collectives.tide.slots import Slot, channels_of

SIZES = {
    "cuda": [1 << power for power in (24, 26, 28, 30)],
    "cpu": [1 << 16, 1 << 20],
}
"""Bytes of a rank's shard."""
PACING = 4


def main() -> None:
    """Measure all sizes; rank 0 writes it down."""
    parser = argparse.ArgumentParser(description="A gather between nodes beside bare puts.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--pacing", type=int, default=PACING, help="puts to a peer under way")
    parser.add_argument("--piece", type=int, default=Gather.piece, help="bytes of a put, at least")
    options = parser.parse_args()
    device = join(options.device)
    size, sizes = dist.get_world_size(), SIZES[device.type]
    group = dist.group.WORLD
    assert group is not None
    fabric = connect(group, 1, 60.0, device=device, transport="nccl")
    slot = Slot(fabric, fabric.allocate(size * (max(sizes) + 256)), 0)
    assert fabric.network is not None
    rail = Rail(fabric.network, channels_of(1), options.pacing)
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        ways = {
            "gather": gather(slot, rail, nbytes, options.piece, device),
            "bare": bare(slot, nbytes, options.piece),
        }
        for name, action in ways.items():
            seconds = clock(action, device)
            moved = nbytes * (size - 1 if name == "gather" else 1)
            rows.append({"what": name, "nbytes": nbytes, "ms": round(1000 * seconds, 4),
                         "GB/s": round(moved / seconds / 1e9, 3)})  # fmt: skip
    if dist.get_rank() == 0:
        summary = {
            str(one["nbytes"]): round(one["GB/s"] / other["GB/s"], 3)
            for one, other in zip(rows[::2], rows[1::2], strict=True)
        }
        print(*rows, summary, sep="\n")
        config = {
            "ranks": size,
            "piece": options.piece,
            "pacing": options.pacing,
            "repeats": REPEATS,
        }
        write(options.json, "tide.network", options.device, config, rows, summary)
    fabric.close()
    dist.destroy_process_group()


def gather(
    slot: Slot, rail: Rail, nbytes: int, piece: int, device: torch.device
) -> Callable[[], None]:
    """TIDE's, of one tensor."""
    size = dist.get_world_size()
    cuts = [(cut((size, nbytes // 2), 0, size), torch.bfloat16)]
    whole = Gather(slot, make_layout(size, cuts), rail, piece=piece, keep=True)
    whole.cast([torch.randn(nbytes // 2, device=device)])

    def action() -> None:
        whole.start(None, "tensor")
        whole.wait()
        slot.release()

    return action


def bare(slot: Slot, nbytes: int, size_of_piece: int) -> Callable[[], None]:
    """A loop of puts to the next rank, and waits for those of the one before."""
    network, region = slot.fabric.network, slot.memory.remote
    assert network is not None
    assert region is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    channel, done = channels_of(1) + RAIL_CHANNELS, 0
    source = slot.memory.local.tensor(
        slot.fabric.topology.local, rank * nbytes, nbytes, torch.uint8
    )

    def action() -> None:
        nonlocal done
        pieces = source.split(size_of_piece)
        for number, piece in enumerate(pieces):
            to = rank * nbytes + number * size_of_piece
            network.put_signal(piece, region, to, (rank + 1) % size, channel, done + number + 1)
        for number in range(len(pieces)):
            network.wait((rank - 1) % size, channel, done + number + 1)
        done += len(pieces)

    return action


def clock(action: Callable[[], None], device: torch.device) -> float:
    """Median seconds, all ranks beginning together."""
    if device.type == "cuda":
        return on_device(action)
    found = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


if __name__ == "__main__":
    main()
