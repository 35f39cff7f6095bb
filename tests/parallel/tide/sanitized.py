"""A few steps on TIDE under torchrun, small enough for compute-sanitizer: see `test_gpu.py`."""

import os

import torch
import torch.distributed as dist

from tests.parallel.tide.test_equality import BF16
from tests.parallel.tide.training import Case, train


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    case = Case("toy", parallel=BF16, tide={"slot_reuse": True, "timeout": 120}, steps=3)
    figures, _ = train(case, "tide")
    print("losses", figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
