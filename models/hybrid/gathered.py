"""Block-sparse attention through flash kernels: for each block, the rows that chose it, gathered.

Neighbouring rows choose different blocks, so a kernel that skips what none of 128 rows sees skips next
to nothing. MoBA's own implementation (Lu et al. 2025, section 2.3) turns the question around, and so
does this one:

    own      each row sees its own block, up to itself: blocks are documents, causal attention
    chosen   for each key/value head and block, the queries that chose it, one after the other: sequences
             of any length against one block, without a mask
    merge    a row's parts, weighted by their sums of exponentials, are what attention to all of its keys
             together gives

In the backward pass each part gets the row's whole output and sum: then the kernel's weights are those
of the whole row, and its gradients what the part's keys contribute. Nothing waits for the device: how
many rows chose a block is known there only, so all pairs are gathered, and those that are none, of rows
with fewer earlier blocks than they may see, lie behind the last sequence.

Legend: T rows, H query heads, K key/value heads (G = H / K), D head dim, N blocks, n choices a row, own
block not counted; Q = T * H queries, R = Q * n pairs of a query and a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models import torch_private
from models.hybrid.documents import Documents
from models.hybrid.merging import merge
from models.permutation import inverse


@dataclass(frozen=True)
class Pairs:
    """Who chose what, sorted by key/value head and block."""

    query_R: Tensor
    """Which query, in the order of the sequences; pairs of no sequence come last."""
    place_nQ: Tensor
    """Where a query's choices are in that order; -1 where it has fewer."""
    bounds_q: Tensor
    """(K * N + 1,) int32: where each sequence of queries begins, and the last one ends."""
    bounds_k: Tensor
    """The same for the keys, of all heads one after the other."""
    longest: int
    """No sequence of queries is longer."""


def pair_up(chosen_HTn: Tensor, begin_N: Tensor, K: int, later: int) -> Pairs:
    """Sort all pairs; `chosen_HTn` has -1 for none. No more than `later` rows can choose a block."""
    (H, T, n), N = chosen_HTn.shape, len(begin_N)
    device = chosen_HTn.device
    head_H11 = torch.arange(H, device=device)[:, None, None] // (H // K)
    sequence_HTn = torch.where(chosen_HTn < 0, K * N, head_H11 * N + chosen_HTn)
    # 32 bits are sorted in half the time
    sorted_R, order_R = sequence_HTn.permute(1, 0, 2).flatten().int().sort(stable=True)
    place_R = inverse(order_R)
    none_nQ = chosen_HTn.permute(2, 1, 0).flatten(1) < 0
    number = torch.arange(K * N + 1, device=device, dtype=sorted_R.dtype)
    first_K1 = torch.arange(K, device=device)[:, None] * T
    end = torch.full((1,), K * T, device=device)
    return Pairs(
        order_R // n,
        place_R.view(-1, n).T.masked_fill(none_nQ, -1),
        torch.searchsorted(sorted_R, number, out_int32=True),
        torch.cat([(first_K1 + begin_N).flatten(), end]).int(),
        H // K * later,
    )


def attend_gathered(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    chosen_HTn: Tensor,
    documents: Documents,
    block: int,
    scale: float,
    kernels: Any = torch_private,
) -> Tensor:
    """Attention to one's own block and chosen earlier ones, of which there is at least one: (T, H, D).

    `kernels` has `flash_forward` and `flash_backward`.
    """
    blocks = documents.cut(block)
    pairs = pair_up(chosen_HTn, blocks.cu_seq_lens[:-1], k_TKD.shape[1], documents.longest - block)
    out_THD: Tensor = _Gathered.apply(q_THD, k_TKD, v_TKD, blocks, pairs, scale, kernels)
    return out_THD


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        blocks: Documents,
        pairs: Pairs,
        scale: float,
        kernels: Any,
    ) -> Tensor:
        block, bounds = blocks.longest, blocks.cu_seq_lens
        own = (bounds, bounds, block, block, True, scale)
        chosen = (pairs.bounds_q, pairs.bounds_k, pairs.longest, block, False, scale)
        own_THD, own_HT = kernels.flash_forward(q_THD, k_TKD, v_TKD, *own)
        q_R1D = q_THD.flatten(0, 1)[pairs.query_R, None]
        part_R1D, part_1R = kernels.flash_forward(q_R1D, _by_head(k_TKD), _by_head(v_TKD), *chosen)
        sums_nQ = part_1R[0][pairs.place_nQ].masked_fill(pairs.place_nQ < 0, float("-inf"))
        own_Q = own_HT.T.flatten()
        sums_PQ = torch.cat([own_Q[None], sums_nQ])
        sums_Q = sums_PQ.logsumexp(0)
        weights_PQ = (sums_PQ - sums_Q).exp()
        own_QD, part_RD = own_THD.flatten(0, 1), part_R1D[:, 0]
        out_QD = merge(own_QD, part_RD, pairs.place_nQ, weights_PQ, q_THD.dtype)
        out_THD = out_QD.view(q_THD.shape)
        context.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, sums_Q)
        context.own, context.chosen, context.pairs, context.kernels = own, chosen, pairs, kernels
        return out_THD

    @staticmethod
    def backward(context: Any, grad_THD: Tensor) -> Any:
        q_THD, k_TKD, v_TKD, out_THD, sums_Q = context.saved_tensors
        pairs, kernels = context.pairs, context.kernels
        grad_THD = grad_THD.contiguous()
        sums_HT = sums_Q.view(q_THD.shape[:2]).T.contiguous()
        dq_THD, dk_TKD, dv_TKD = kernels.flash_backward(
            grad_THD, q_THD, k_TKD, v_TKD, out_THD, sums_HT, *context.own
        )
        grad_R1D, q_R1D, out_R1D = (
            x.flatten(0, 1)[pairs.query_R, None] for x in (grad_THD, q_THD, out_THD)
        )
        part_R1D, *parts = kernels.flash_backward(
            grad_R1D, q_R1D, _by_head(k_TKD), _by_head(v_TKD), out_R1D, sums_Q[pairs.query_R][None],
            *context.chosen,
        )  # fmt: skip
        dq_QD = merge(dq_THD.flatten(0, 1), part_R1D[:, 0], pairs.place_nQ, None, q_THD.dtype)
        K, T = k_TKD.shape[1], len(k_TKD)
        dk_TKD, dv_TKD = (
            whole + part.view(K, T, -1).transpose(0, 1)
            for whole, part in zip((dk_TKD, dv_TKD), parts, strict=True)
        )
        return dq_QD.view(q_THD.shape), dk_TKD, dv_TKD, *[None] * 4


def _by_head(x_TKD: Tensor) -> Tensor:
    """One head's rows after the other's: (K * T, 1, D)."""
    return x_TKD.transpose(0, 1).flatten(0, 1)[:, None]
