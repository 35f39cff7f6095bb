"""One machine, looked at by one process; `trainer.doctor.gpus` knows its GPUs."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from parallel.torch_private import TESTED, check_private_apis
from trainer.doctor.finding import NOTE, PROBLEM, WELL, Finding
from trainer.doctor.gpus import collectives, gpus
from trainer.watch.tracker import has_key

GIB = 2**30
SHARED = 1.0
"""GiB of shared memory that CPU ranks and data workers should find."""
CARDS = Path("/sys/class/infiniband")
"""Where Linux has a folder for each network card that does RDMA."""
PYTHONS = ((3, 11), (3, 13))


def look(folder: Path, require_gpu: bool = False) -> Iterator[Finding]:
    """Everything that this process can see; runs would be written under `folder`.

    `require_gpu`: to have none is a problem.
    """
    yield software()
    yield from gpus(require_gpu)
    yield from collectives()
    if torch.cuda.device_count():
        yield cards()
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


def cards() -> Finding:
    """What joins this machine to others, and whether its cards may read the memory of GPUs."""
    found = sorted(CARDS.iterdir()) if CARDS.is_dir() else []
    ports = [port for card in found for port in sorted((card / "ports").iterdir())]
    rates = [
        f"{port.parent.parent.name} {(port / 'rate').read_text().split(' (')[0].strip()}"
        for port in ports
        if "ACTIVE" in (port / "state").read_text()
    ]
    if not rates:
        return Finding("network cards", NOTE, "none does RDMA", "nodes would talk over sockets")
    text = ", ".join(rates[:4]) + (f" and {len(rates) - 4} more" if len(rates) > 4 else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        remedy = "RDMA needs more: ulimit -l unlimited, or IPC_LOCK for a container"
        return Finding("network cards", NOTE, f"{text}; {locked} bytes may be locked", remedy)
    return Finding("network cards", WELL, text)


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
