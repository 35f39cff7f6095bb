"""Rows that were sorted, and where each of them is."""

import torch
from torch import Tensor


def inverse(order_R: Tensor) -> Tensor:
    """Where each number is in a permutation of R numbers."""
    number_R = torch.arange(len(order_R), device=order_R.device)
    return torch.empty_like(order_R).index_copy_(0, order_R, number_R)
