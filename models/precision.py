"""Where fp32 is wanted at the least."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """In fp32, but fp64 stays: there, everything is meant to be exact."""
    return x if x.dtype == torch.float64 else x.float()
