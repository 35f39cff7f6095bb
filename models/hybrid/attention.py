"""Who sees whom in packed documents, and attention that computes it, behind one function.

Legend: T rows, of all documents end to end; H query heads, K key/value heads, D head dim; L rows of one
document.

A row sees rows of its own document that do not come after it. Of these,

    full             all
    sliding_window   the last `window`, itself included
    block_topk       those of its own block, and of `top_k - 1` earlier blocks (`models.hybrid.blocks`)

`attend` is all that a layer needs to know. It takes whatever heads it is given, also none, so that
heads can be spread over ranks: no head looks at another one's scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import varlen_keywords
from models.hybrid.blocks import attend_blocks, block_mask, chosen_blocks
from models.hybrid.documents import Documents
from models.hybrid.long_documents import LONG, attend_causally, is_faster
from models.hybrid.shape import BLOCK_TOPK, FULL, SLIDING_WINDOW, Shape


@dataclass(frozen=True)
class Rule:
    """Who sees whom in a layer."""

    kind: str
    scale: float
    """What scores are multiplied by."""
    window: int = 0
    block: int = 0
    top_k: int = 0


def rule_of(shape: Shape, kind: str) -> Rule:
    """The rule of the layers of a kind."""
    scale = shape.head_dim**-0.5
    if kind == SLIDING_WINDOW:
        return Rule(kind, scale, window=shape.window)
    if kind == BLOCK_TOPK:
        return Rule(kind, scale, block=shape.block, top_k=shape.top_k)
    return Rule(kind, scale)


ROWS = 512
"""So many rows of a document look at their windows together, where no kernel does it."""

Attend = Callable[[Tensor, Tensor, Tensor, Rule], Tensor]
"""What a layer calls, with the queries (T, H, D), keys and values (T, K, D) of the rows that it has.

Returns what these rows saw, (T, H, D). Where documents are spread over ranks, an implementation collects
them before and brings the rows back after.
"""


def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, rule: Rule) -> Tensor:
    """Attention inside each document under `rule`: (T, H, D). H is a multiple of K.

    On a GPU in half precision by flash kernels; elsewhere, and in any type, `attend_reference`.
    """
    if not q_THD.numel():  # no rows, or no heads: connected all the same, for the backward pass
        return q_THD + k_TKD.sum() + v_TKD.sum()
    if q_THD.device.type == "meta":
        return _attend_meta(q_THD, k_TKD, v_TKD, rule)
    if q_THD.device.type != "cuda" or q_THD.dtype not in (torch.float16, torch.bfloat16):
        return attend_reference(q_THD, k_TKD, v_TKD, documents, rule)
    # a document no longer than what a row sees anyway is seen whole
    if rule.kind == BLOCK_TOPK and documents.longest > rule.block * rule.top_k:
        if rule.top_k > 1:
            return attend_blocks(q_THD, k_TKD, v_TKD, documents, rule.block, rule.top_k, rule.scale)
        documents = documents.cut(rule.block)
    elif rule.kind != SLIDING_WINDOW and documents.longest >= LONG and is_faster(q_THD):
        packed = partial(_flash, rule=rule)
        return attend_causally(q_THD, k_TKD, v_TKD, documents, rule.scale, packed)
    return _flash(q_THD, k_TKD, v_TKD, documents, rule)


def _flash(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, rule: Rule) -> Tensor:
    """torch's kernel for packed documents: all that comes before, or a window of it."""
    from torch.nn.attention.varlen import varlen_attn

    causal, has_gqa = varlen_keywords()
    keywords: dict[str, Any] = {**causal, "scale": rule.scale}
    if rule.kind == SLIDING_WINDOW:
        if "window_size" not in keywords:
            raise ValueError("this torch has no sliding window: set model.sparse=block_topk")
        keywords["window_size"] = (rule.window - 1, 0)
    groups = q_THD.shape[1] // k_TKD.shape[1]
    if groups > 1 and has_gqa:
        keywords["enable_gqa"] = True
    elif groups > 1:
        k_TKD, v_TKD = (x.repeat_interleave(groups, dim=1) for x in (k_TKD, v_TKD))
    bounds, longest = documents.cu_seq_lens, documents.longest
    out_THD = varlen_attn(q_THD, k_TKD, v_TKD, bounds, bounds, longest, longest, **keywords)
    assert isinstance(out_THD, Tensor)
    return out_THD


def attend_reference(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, rule: Rule
) -> Tensor:
    """The same a document at a time, with a mask where the rule is not just causal."""
    masks: Sequence[Tensor | None] = [None] * len(documents.lengths)
    if rule.kind == SLIDING_WINDOW and documents.longest > rule.window:
        parts = zip(*(x.split(documents.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        return torch.cat([_attend_window(q, k, v, rule) for q, k, v in parts])
    if rule.kind == BLOCK_TOPK and documents.longest > rule.block * rule.top_k:
        chosen_HTN = chosen_blocks(q_THD, k_TKD, documents, rule.block, rule.top_k)
        masks = block_mask(chosen_HTN, documents, rule.block)
    q, k, v = (x.split(documents.lengths) for x in (q_THD, k_TKD, v_TKD))
    each = zip(q, k, v, masks, strict=True)
    return torch.cat([_attend_one(*one, scale=rule.scale) for one in each])


def _attend_one(
    q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, mask: Tensor | None, *, scale: float
) -> Tensor:
    q_1HLD, k_1KLD, v_1KLD = (x.transpose(0, 1)[None] for x in (q_LHD, k_LKD, v_LKD))
    out_1HLD = nn.functional.scaled_dot_product_attention(
        q_1HLD, k_1KLD, v_1KLD, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=q_1HLD.shape[1] != k_1KLD.shape[1],
    )  # fmt: skip
    return out_1HLD[0].transpose(0, 1)


def _attend_window(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, rule: Rule) -> Tensor:
    """One document, some rows at a time with the keys that they see: its length may be anything."""
    L, parts = len(q_LHD), []
    if rule.window >= L:  # it sees all that is before it
        return _attend_one(q_LHD, k_LKD, v_LKD, None, scale=rule.scale)
    for begin in range(0, L, ROWS):
        end, first = min(begin + ROWS, L), max(begin - rule.window + 1, 0)
        row_C1 = torch.arange(begin, end, device=q_LHD.device)[:, None]
        column_U = torch.arange(first, end, device=q_LHD.device)
        sees_CU = (column_U <= row_C1) & (column_U > row_C1 - rule.window)
        keys, values = k_LKD[first:end], v_LKD[first:end]
        parts.append(_attend_one(q_LHD[begin:end], keys, values, sees_CU, scale=rule.scale))
    return torch.cat(parts)


def _attend_meta(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
    """Shapes only: what a dry run takes for a fused kernel, whatever the rule."""
    assert rule.kind in (FULL, SLIDING_WINDOW, BLOCK_TOPK)
    return _attend_one(q_THD, k_TKD, v_TKD, None, scale=rule.scale)
