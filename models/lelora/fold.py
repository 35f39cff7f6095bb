"""What is no longer trained, as one frozen product of low rank.

    M outputs, N inputs, C rows that there is room for, r rows of a product

Rows that stop training leave what they have learnt here. When it does not fit, the product is
decomposed, and its smallest components are dropped, if that loses little enough.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Folded:
    """A product of at most C rows, and what was lost."""

    left_MC: Tensor
    right_CN: Tensor
    rank: int
    """Rows in use."""
    discarded: float
    """Frobenius norm of what was dropped, as a share of the whole."""


def compress(left_Mr: Tensor, right_rN: Tensor, rank: int) -> Folded:
    """The best product of at most `rank` rows for left @ right, without forming it, in fp64.

    Both factors get the square root of the singular values, so that neither is large.
    """
    outputs, inputs = left_Mr.shape[0], right_rN.shape[1]
    q_left, r_left = torch.linalg.qr(left_Mr.double())
    q_right, r_right = torch.linalg.qr(right_rN.double().T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    total = float(s.square().sum().sqrt())
    if total == 0:
        empty = left_Mr.new_zeros(outputs, 0, dtype=torch.float64)
        return Folded(empty, empty.new_zeros(0, inputs), 0, 0.0)
    kept = min(int((s > 1e-12 * s[0]).sum()), rank)
    root = s[:kept].sqrt()
    left = q_left @ (u[:, :kept] * root)
    right = (vh[:kept] * root[:, None]) @ q_right.T
    lost = float(s[kept:].square().sum().sqrt())
    return Folded(left, right, kept, lost / total if lost > 1e-9 * total else 0.0)


def add(fold_b_MC: Tensor, fold_a_CN: Tensor, left_Mr: Tensor, right_rN: Tensor) -> Folded:
    """What is folded already and left @ right, in as many rows as there are."""
    rows = fold_b_MC.shape[1]
    filled = ((fold_b_MC != 0).any(0) & (fold_a_CN != 0).any(1)).nonzero()
    used = int(filled.max()) + 1 if len(filled) else 0
    left = torch.cat([fold_b_MC[:, :used].double(), left_Mr.double()], 1)
    right = torch.cat([fold_a_CN[:used].double(), right_rN.double()], 0)
    if left.shape[1] <= rows:
        return Folded(left, right, left.shape[1], 0.0)
    return compress(left, right, rows)
