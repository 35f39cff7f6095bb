"""How a benchmark under torchrun becomes one of its ranks."""

import os

import torch
import torch.distributed as dist


def join(kind: str) -> torch.device:
    """Join the process group of all ranks; `kind` is cpu or cuda. Returns this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device
