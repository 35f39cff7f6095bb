"""Causal attention over packed documents, for any transformers model that calls an interface.

Legend: B sequences in the batch, S tokens a sequence, H query heads, K key/value heads,
D head dimension, T = B * S tokens in all.

transformers hands every attention layer to a function registered under a name. Ours takes the
document boundaries as `cu_seq_lens_q` (int32, one more entry than documents, over the flattened
T tokens) and `max_length_q` and runs the flash kernel of `torch.nn.attention.varlen`, so that no
mask of size S x S exists. Where that kernel cannot run (CPU, fp32) it falls back to plain
scaled-dot-product attention with `document_mask`, which is also the reference in the tests.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "springtide_packed"


@cache
def _varlen_keywords() -> tuple[dict[str, Any], bool]:
    """How this torch spells 'causal' and 'grouped queries': both keywords changed after 2.10."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    return causal, "enable_gqa" in names


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token to the earlier tokens of its own document.

    `query` is (B, H, S, D), `key` and `value` (B, K, S, D). `attention_mask` may hold the
    `document_mask`, made once for all layers; it is used where the flash kernel cannot run.
    Returns (B, S, H, D). Raises `ValueError` for variants of attention that are not built here.
    """
    if softcap is not None:
        raise ValueError("packed attention has no logit soft-capping: set model.attention=sdpa")
    B, H, S, D = query.shape
    flash = query.device.type in ("cuda", "meta")  # meta: what a dry run plans for
    if not flash or query.dtype not in (torch.float16, torch.bfloat16):
        if sliding_window is not None:
            raise ValueError("no sliding window without the flash kernel: set model.attention=sdpa")
        mask = document_mask(cu_seq_lens_q, B, S) if attention_mask is None else attention_mask
        out_BHSD = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=key.shape[1] != H
        )
        return out_BHSD.transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    causal, has_gqa = _varlen_keywords()
    keywords = dict(causal)
    if sliding_window is not None:
        if "window_size" not in keywords:
            raise ValueError("this torch has no sliding window here: set model.attention=sdpa")
        keywords["window_size"] = (sliding_window - 1, 0)
    if scaling is not None:
        keywords["scale"] = scaling
    if has_gqa and key.shape[1] != H:
        keywords["enable_gqa"] = True
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out_THD = varlen_attn(
        q_THD, k_TKD, v_TKD, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **keywords
    )
    assert isinstance(out_THD, Tensor)
    return out_THD.view(B, S, H, D), None


def document_mask(cu_seq_lens: Tensor, B: int, S: int) -> Tensor:
    """The same rule as a mask: (B, 1, S, S), True where a query (row) may see a key (column).

    `cu_seq_lens` must have a boundary at every multiple of S: documents never span two sequences.
    """
    token = torch.arange(B * S, device=cu_seq_lens.device)
    document_BS = torch.bucketize(token, cu_seq_lens, right=True).view(B, S)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=cu_seq_lens.device).tril()
    return (same_BSS & causal_SS)[:, None]


AttentionInterface.register(NAME, packed_attention)
