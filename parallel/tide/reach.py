"""Which transport joins the ranks of a group: the best that works, and why not a better one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collectives.nccl import unusable

CHAIN = ("nccl", "symm_mem")
"""Between GPUs, the best first; after the last come torch's own collectives."""


@dataclass(frozen=True)
class Reach:
    """A transport, or None with the reason; `instead` says why a better one is not used."""

    transport: str | None
    reason: str = ""
    instead: str = ""


def reach(device: torch.device, wanted: str, ranks: Sequence[int], node_size: int) -> Reach:
    """How `ranks`, each with a device like this one, reach each other; `wanted`: the configured way."""
    fits = {"cpu": ("shm",), "cuda": CHAIN}.get(device.type)
    if fits is None:
        return Reach(None, f"there is no transport for {device.type}")
    if wanted not in ("auto", *fits):
        return Reach(None, f"collectives.transport={wanted} is not for {device.type}")
    if device.type == "cpu":
        return Reach("shm")
    if len({rank // node_size for rank in ranks}) > 1:
        return _between_nodes(wanted)
    reason = _apart(device)
    if reason:
        return Reach(None, reason)
    problem = unusable() if wanted != "symm_mem" else None
    if wanted == "symm_mem" or problem:
        return Reach("symm_mem", instead=f"not nccl: {problem}" if problem else "")
    return Reach("nccl")


def _between_nodes(wanted: str) -> Reach:
    """GPUs of several nodes: only where it is asked for, since no cluster has run it yet."""
    if wanted != "nccl":
        return Reach(None, "between GPUs of several nodes it has to be collectives.transport=nccl")
    problem = unusable()
    return Reach(None, problem) if problem else Reach("nccl")


def _apart(device: torch.device) -> str | None:
    """Why GPUs of this machine cannot write to each other."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 would have its streams wait for each other"
    others = [n for n in range(torch.cuda.device_count()) if n != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "its GPUs cannot reach each other's memory"
    return None
