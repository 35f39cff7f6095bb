"""The only place in `models` that calls private functions of torch.

`tests/models/test_torch_private.py` fails loudly when a new torch changes one of them.
"""

import torch
from torch import Tensor


def flash_forward(
    q_RHD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Flash attention of packed sequences: the output (R, H, D), and the logarithm of each row's sum of
    exponentials (H, R) in fp32. What is behind the last bound is not written.

    `torch.nn.attention.varlen` has no way to put a gradient through parts of a row's keys.
    """
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q_RHD,
        k_UKD,
        v_UKD,
        bounds_q,
        bounds_k,
        longest_q,
        longest_k,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return out, sums


def flash_backward(
    grad_RHD: Tensor,
    q_RHD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    out_RHD: Tensor,
    sums_HR: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, of what `flash_forward` computes.

    `out_RHD` and `sums_HR` may be those of rows that have seen more keys than these: the gradients are
    then what these keys contribute.
    """
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_RHD.device)
    unused = torch.empty(0, device=q_RHD.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad_RHD, q_RHD, k_UKD, v_UKD, out_RHD, sums_HR, bounds_q, bounds_k, longest_q, longest_k,
        0.0, causal, no_dropout, unused, scale=scale,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
