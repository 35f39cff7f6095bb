"""One machine, looked at by one process."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from collectives.nccl import running_version, unusable, version_text
from parallel.tide.reach import reach
from parallel.torch_private import TESTED, check_private_apis
from trainer.devices import device_by_name
from trainer.doctor.finding import NOTE, PROBLEM, WELL, Finding
from trainer.watch.tracker import has_key

GIB = 2**30
SHARED = 1.0
"""GiB of shared memory that CPU ranks and data workers should find."""
COPIED = 1 << 28
"""Bytes of a copy that a link is measured with."""
PYTHONS = ((3, 11), (3, 13))


def look(folder: Path) -> Iterator[Finding]:
    """Everything that this process can see; runs would be written under `folder`."""
    yield software()
    yield from gpus()
    yield from collectives()
    yield from storage(folder)
    yield from extras()


def software() -> Finding:
    """Python and torch."""
    text = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("software", PROBLEM, text, f"use Python {low} to {high}")
    try:
        check_private_apis()
    except RuntimeError as error:
        return Finding("software", PROBLEM, text, str(error))
    if torch.__version__.split(".")[:2] > TESTED[1].split("."):
        return Finding("software", NOTE, text, f"newer than {TESTED[1]}, which was tested")
    return Finding("software", WELL, text)


def gpus() -> Iterator[Finding]:
    """Devices, their memory, and whether they reach each other's."""
    count = torch.cuda.device_count()
    if not count:
        built = torch.version.cuda
        reason = "none is visible" if built else "this torch is built without CUDA"
        yield Finding("GPUs", NOTE, reason, "runs use CPU ranks, which is for trying things out")
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


def collectives() -> Iterator[Finding]:
    """Which way data would travel between the ranks of this machine, and why not a better one."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    found = reach(device, "auto", range(max(count, 1)), max(count, 1))
    if count:
        if find_spec("triton") is None:
            yield Finding("Triton", PROBLEM, "missing", "TIDE's sums need it: pip install triton")
        problem = unusable()
        yield Finding(
            "NCCL", NOTE if problem else WELL, version_text(running_version()), problem or ""
        )
    if found.transport is None:
        yield Finding("collectives", NOTE, "torch's", found.reason)
    else:
        ranks = "GPUs" if count else "CPU ranks"
        yield Finding("collectives", WELL, f"TIDE over {found.transport} between {ranks}")


def storage(folder: Path) -> Iterator[Finding]:
    """Where runs and shared memory go."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if not os.access(place, os.W_OK):
        remedy = "set run.root or run.dir to a folder that can be written"
        yield Finding("run folder", PROBLEM, f"{place} cannot be written", remedy)
    else:
        yield Finding("run folder", WELL if free > 20 else NOTE, f"{folder}, {free:,.0f} GiB free")
    shared = Path("/dev/shm")  # noqa: S108 - its size is looked at, nothing is written
    if shared.is_dir():
        size = shutil.disk_usage(shared).free / GIB
        remedy = "" if size >= SHARED else "give the container more (docker run --shm-size=8g)"
        yield Finding("shared memory", NOTE if remedy else WELL, f"{size:.1f} GiB free", remedy)


def extras() -> Iterator[Finding]:
    """What is only needed for some things."""
    packages = {"pyarrow": "data", "tensorboard": "tensorboard", "wandb_workspaces": "dashboard"}
    missing = sorted(extra for name, extra in packages.items() if find_spec(name) is None)
    if missing:
        install = f"pip install 'springtide[{','.join(missing)}]'"
        yield Finding("extras", NOTE, f"without {', '.join(missing)}", install)
    else:
        yield Finding("extras", WELL, "all there")
    if has_key():
        yield Finding("wandb", WELL, "there is a key")
    else:
        yield Finding("wandb", NOTE, "no key", "runs are offline; wandb login, or WANDB_API_KEY")
