"""The GPUs of one machine: driver, links, NCCL, and which way data would travel between them."""

import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from collectives.nccl import running_version, unusable, version_text
from collectives.symmetric.cuda_driver import has_multicast, newest_cuda
from parallel.tide.reach import reach
from parallel.tide.suitable import SMALLEST
from trainer.devices import device_by_name
from trainer.doctor.finding import NOTE, PROBLEM, WELL, Finding

GIB = 2**30
COPIED = 1 << 28
"""Bytes of a copy that a link is measured with."""
TORCHRUN = "torchrun --nproc-per-node=gpu -m trainer.doctor"


def gpus(required: bool) -> Iterator[Finding]:
    """The driver, devices, their memory, and whether they reach each other's."""
    yield from driver()
    count = torch.cuda.device_count()
    if not count:
        built = torch.version.cuda
        reason = "none is visible" if built else "this torch is built without CUDA"
        remedy = "runs use CPU ranks, which is for trying things out"
        yield Finding("GPUs", PROBLEM if required else NOTE, reason, "" if required else remedy)
        return
    names = sorted({torch.cuda.get_device_name(n) for n in range(count)})
    free = min(torch.cuda.mem_get_info(n)[0] for n in range(count)) / GIB
    text = f"{count} x {', '.join(names)}, CUDA {torch.version.cuda}, {free:.1f} GiB free at least"
    if len(names) > 1:
        yield Finding("GPUs", NOTE, text, "ranks wait for the slowest kind")
    elif device_by_name(names[0]) is None:
        yield Finding("GPUs", NOTE, text, "its peak is not known here: no MFU, no time in plans")
    else:
        yield Finding("GPUs", WELL, text)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        shown = ", ".join(f"{a}-{b}" for a, b in apart[:4])
        yield Finding("peer access", NOTE, f"missing between {shown}", "TIDE leaves them to torch")
    elif pairs:
        yield link_rates(pairs)
        yield multicast(count)


def driver() -> Iterator[Finding]:
    """Whether the driver is new enough for this torch; nothing without either."""
    built, newest = torch.version.cuda, newest_cuda()
    if built is None:
        if newest is not None:
            text = f"it runs CUDA {newest[0]}.{newest[1]}, but this torch is built without CUDA"
            yield Finding("driver", NOTE, text, "install a CUDA build of torch")
        return
    if newest is None:
        text = f"missing; this torch is built for CUDA {built}"
        yield Finding(
            "driver", NOTE, text, "install NVIDIA's driver, or pass GPUs to the container"
        )
    elif newest[0] < int(built.partition(".")[0]):
        text = f"it runs CUDA {newest[0]}.{newest[1]}, this torch is built for {built}"
        yield Finding("driver", PROBLEM, text, "update the driver, or install a build for less")
    else:  # within a major version, older drivers run newer builds
        yield Finding("driver", WELL, f"runs CUDA up to {newest[0]}.{newest[1]}")


def link_rates(pairs: list[tuple[int, int]]) -> Finding:
    """GB/s of a large copy from each GPU to each other, one at a time."""
    rates = {pair: _rate(*pair) for pair in pairs}
    (slowest, low), high = min(rates.items(), key=lambda item: item[1]), max(rates.values())
    text = f"{low:.0f} to {high:.0f} GB/s a pair, one way"
    if low < 0.8 * high:
        return Finding("links", NOTE, text, f"{slowest[0]} to {slowest[1]} is the slowest")
    return Finding("links", WELL, text)


def _rate(source: int, target: int) -> float:
    sent = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{source}")
    got = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{target}")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        begin = time.perf_counter()
        got.copy_(sent)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        seconds.append(time.perf_counter() - begin)
    return COPIED / min(seconds) / 1e9


def multicast(count: int) -> Finding:
    """Whether one write can reach all GPUs of the machine."""
    without = [n for n in range(count) if not has_multicast(n)]
    if without:
        shown = ", ".join(map(str, without[:4]))
        return Finding("multicast", NOTE, f"not on {shown}", "a write to each peer does its work")
    return Finding("multicast", WELL, "one write can reach all")


def collectives() -> Iterator[Finding]:
    """Which way data would travel between the ranks of this machine, and why not a better one."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    found = reach(device, "auto", range(max(count, 1)), max(count, 1))
    if count:
        if find_spec("triton") is None:
            yield Finding("Triton", PROBLEM, "missing", "TIDE's sums need it: pip install triton")
        yield nccl()
    if found.transport is None:
        yield Finding("collectives", NOTE, "torch's", found.reason)
    elif not count:
        yield Finding("collectives", WELL, f"TIDE over {found.transport} between CPU ranks")
    else:
        least = f"layers of {SMALLEST >> 20} MiB or more, the others by torch's collectives"
        text = f"TIDE over {found.transport} between GPUs: {least}"
        yield Finding("collectives", WELL, text)


def nccl() -> Finding:
    """The NCCL that runs, beside the one that torch was built with."""
    running, built = running_version(), tuple(torch.cuda.nccl.version())
    text = version_text(running)
    if running is not None and running != built:
        text += f" runs, torch was built with {'.'.join(map(str, built))}"
    problem = unusable()
    if problem:
        return Finding("NCCL", NOTE, text, problem)
    return Finding("NCCL", WELL, f"{text}; {TORCHRUN} asks whether it puts and signals")
