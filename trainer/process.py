"""What a rank does to its own process: output, process group, random states."""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_original_stderr: int | None = None


def console() -> Any:
    """Standard error as the rank was born with it."""
    return sys.stderr if _original_stderr is None else os.fdopen(os.dup(_original_stderr), "w")


def redirect_output(file: Path) -> None:
    """Send everything this process prints, libraries included, to `file`."""
    global _original_stderr
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    _original_stderr = os.dup(2)
    with file.open("a") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)


@contextmanager
def process_group(timeout: float, alone: bool) -> Iterator[Any]:
    """Join the ranks; yields this rank's device. A lone rank needs no launcher."""
    env = {} if alone else os.environ
    rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    local_rank = int(env.get("LOCAL_RANK", "0"))
    if os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1"):
        # One machine: gloo need not ask what address the host's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Streams of collectives must not share a hardware queue with each other: they would wait there.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if torch.cuda.is_available():
        # Some launchers show each rank its own GPU only, as number 0.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend, device_id = "cpu:gloo,cuda:nccl", device
    else:
        device, backend, device_id = torch.device("cpu"), "gloo", None
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
        timeout=timedelta(seconds=timeout),
        device_id=device_id,
    )
    try:
        yield device
        dist.barrier()
    finally:
        # After a failure the peers may be gone, and saying goodbye to them would hang.
        if sys.exc_info()[0] is None or world_size == 1:
            dist.destroy_process_group()


def seed_everything(seed: int, deterministic: bool) -> None:
    """Equal random states on every rank; `deterministic` also refuses operations that are not."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
