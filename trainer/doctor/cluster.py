"""Several ranks, looked at together: do they match, does time agree, how fast do they talk?"""

import platform
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from collectives.host import broadcast, gather_objects
from collectives.nccl import running_version, version_text
from trainer.doctor.finding import NOTE, PROBLEM, WELL, Finding
from trainer.doctor.tide import ways

SKEW = 1.0
"""Seconds between clocks, from where on logs of nodes cannot be read together."""
SENT = 1 << 26
"""Bytes of a message that the network is measured with."""
ALIKE = ("Python", "torch", "NCCL", "device", "memory")
"""What all ranks must have the same of, or better have."""


def look_together(
    own: Sequence[Finding], folder: Path, local_size: int, device: torch.device
) -> Iterator[Finding]:
    """All ranks call it and get the same: rank 0's `own` findings, and what is bad with other nodes.

    `local_size` is the number of ranks on a node.
    """
    about = gather_objects(describe(folder, device))
    yield from broadcast(list(own))
    for rank, found in enumerate(gather_objects(list(own))):
        if rank:
            where = about[rank]["host"]
            bad = (each for each in found if each.state == PROBLEM)
            yield from (replace(each, what=f"{each.what}, {where}") for each in bad)
    nodes = list(dict.fromkeys(each["host"] for each in about))
    yield Finding("ranks", WELL, f"{len(about)} on {len(nodes)} nodes ({_few(nodes)})")
    yield from differences(about)
    yield skew(gather_objects(clock_offset()))
    yield shared_folder(folder)
    yield from ways(local_size, device)
    if len(about) > local_size:
        yield network(local_size, device)


def describe(folder: Path, device: torch.device) -> dict[str, Any]:
    """What this rank is."""
    gpu = device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NCCL": version_text(running_version()) if gpu else "",
        "device": torch.cuda.get_device_name(device) if gpu else "CPU",
        "memory": round(torch.cuda.mem_get_info(device)[1] / 2**30) if gpu else 0,
        "folder": str(folder),
    }


def differences(about: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Where ranks are not alike."""
    for key in ALIKE:
        kinds: dict[Any, list[int]] = {}
        for rank, each in enumerate(about):
            kinds.setdefault(each[key], []).append(rank)
        if len(kinds) > 1:
            text = "; ".join(f"{kind} on {_few(ranks)}" for kind, ranks in kinds.items())
            state = NOTE if key in ("device", "memory", "Python") else PROBLEM
            yield Finding(key, state, f"ranks differ: {text}", "install the same everywhere")


def clock_offset(rounds: int = 5) -> float:
    """Seconds that this rank's clock is ahead of rank 0's: of the quickest of a few exchanges.

    Every rank calls it. Rank 0's clock is read between two readings of the others' (Cristian 1989).
    """
    offsets = []
    for _ in range(rounds):
        dist.barrier()
        before = time.time()
        reference = float(broadcast(time.time()))
        after = time.time()
        offsets.append((after - before, (before + after) / 2 - reference))
    return min(offsets)[1]


def skew(offsets: Sequence[float]) -> Finding:
    """The widest gap between two clocks."""
    gap = max(offsets) - min(offsets)
    ahead = offsets.index(max(offsets))
    text = f"{1000 * gap:.1f} ms apart at most"
    if gap > SKEW:
        return Finding("clocks", NOTE, f"{text} (rank {ahead} is ahead)", "start ntpd or chronyd")
    return Finding("clocks", WELL, text)


def shared_folder(folder: Path) -> Finding:
    """Whether every rank sees what rank 0 writes."""
    mark = folder / f".doctor-{broadcast(time.time_ns())}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    blind = [rank for rank, sees in enumerate(gather_objects(mark.exists())) if not sees]
    dist.barrier()
    if dist.get_rank() == 0:
        mark.unlink()
    if blind:
        remedy = "set run.root to a folder that every node sees"
        return Finding("run folder", PROBLEM, f"not seen by {_few(blind)}: {folder}", remedy)
    return Finding("run folder", WELL, f"all ranks see {folder}")


def network(local_size: int, device: torch.device) -> Finding:
    """GB/s from each node to the next, all ranks sending at once to their like on the next node."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(SENT, dtype=torch.uint8, device=device)
    got = torch.empty_like(sent)
    seconds = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + local_size) % size),
                dist.P2POp(dist.irecv, got, (rank - local_size) % size),
            ]
        )
        for each in work:
            each.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    rates = gather_objects(SENT / min(seconds) / 1e9)
    low, high = min(rates), max(rates)
    text = f"{low:.1f} to {high:.1f} GB/s a rank to the next node, all at once"
    if low < 0.7 * high:
        return Finding("network", NOTE, text, f"rank {rates.index(low)} is the slowest")
    return Finding("network", WELL, text)


def _few(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:3]))
    return shown + (f" and {len(items) - 3} more" if len(items) > 3 else "")
