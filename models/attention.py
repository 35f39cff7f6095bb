"""Causal attention over packed documents, for any transformers model that calls an interface.

Legend: B sequences in the batch, S tokens a sequence, H query heads, K key/value heads,
D head dimension, T = B * S tokens in all; U keys.

transformers hands every attention layer to a function registered under a name. Ours takes the
document boundaries as `cu_seq_lens_q` (int32, one more entry than documents, over the flattened
T tokens) and `max_length_q` and runs the flash kernel of `torch.nn.attention.varlen`, so that no
mask of size S x S exists. Where that kernel cannot run (CPU, fp32) it falls back to plain
scaled-dot-product attention with `document_mask`, which is also the reference in the tests.

Where ranks share sequences, `shared_rows` brings rows or heads together around the same attention.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "springtide_packed"


class Documents(Protocol):
    """Rows by document, in order."""

    @property
    def cu_seq_lens(self) -> Tensor:
        """(documents + 1,) int32: where each begins, and the number of rows."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Of each, on the host."""
        ...


class SharedRows(Protocol):
    """The rows of a micro-batch over the ranks that share it; see `parallel.sequence`."""

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor],
        q_tHD: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        window: int | None,
        /,
    ) -> Tensor:
        """Attention of this rank's rows to those of all ranks, by calling `attention` on some."""
        ...


@cache
def varlen_keywords() -> tuple[dict[str, Any], bool]:
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
    s_aux: Tensor | None = None,
    shared_rows: SharedRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token to the earlier tokens of its own document.

    `query` is (B, H, S, D), `key` and `value` (B, K, S, D). `attention_mask` may hold the
    `document_mask`, made once for all layers; it is used where the flash kernel cannot run.
    Returns (B, S, H, D). Raises `ValueError` for variants of attention that are not built here.
    """
    if softcap is not None:
        raise ValueError("packed attention has no logit soft-capping: set model.attention=sdpa")
    if s_aux is not None:
        raise ValueError("packed attention has no sinks: set model.attention=eager")
    B, H, S, D = query.shape
    if shared_rows is not None:
        attention = partial(documents_attention, scaling=scaling, window=sliding_window)
        q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out_THD = shared_rows.attend(attention, q_THD, k_TKD, v_TKD, sliding_window)
        return out_THD.view(B, S, H, D), None
    if not _has_flash(query):
        if sliding_window is not None:
            raise ValueError("no sliding window without the flash kernel: set model.attention=sdpa")
        mask = document_mask(cu_seq_lens_q, B, S) if attention_mask is None else attention_mask
        out_BHSD = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=key.shape[1] != H
        )
        return out_BHSD.transpose(1, 2), None
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    documents = (cu_seq_lens_q, max_length_q)
    out_THD = _flash(q_THD, k_TKD, v_TKD, documents, documents, scaling, sliding_window)
    return out_THD.view(B, S, H, D), None


def documents_attention(
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    queries: Documents,
    keys: Documents,
    *,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Each query's attention to the keys of its document that come before it, itself included.

    Queries and keys of a document end at the same row; there may be more keys. With a `window` only
    the last so many are seen. Returns (T, H, D).
    """
    if _has_flash(q_THD):
        return _flash(
            q_THD, k_UKD, v_UKD, (queries.cu_seq_lens, max(queries.lengths)),
            (keys.cu_seq_lens, max(keys.lengths)), scaling, window,
        )  # fmt: skip
    parts = (q_THD.split(queries.lengths), k_UKD.split(keys.lengths), v_UKD.split(keys.lengths))
    return torch.cat(
        [_document_attention(q, k, v, scaling, window) for q, k, v in zip(*parts, strict=True)]
    )


def _document_attention(
    q_SHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """The same for one document, by plain scaled-dot-product attention."""
    S, U = len(q_SHD), len(k_UKD)
    mask_SU = None
    if S != U or (window is not None and window < U):
        age_SU = torch.arange(U - S, U, device=q_SHD.device)[:, None]
        age_SU = age_SU - torch.arange(U, device=q_SHD.device)
        mask_SU = (age_SU >= 0) & (age_SU < (window or U))
    q_1HSD, k_1KUD, v_1KUD = (x.transpose(0, 1)[None] for x in (q_SHD, k_UKD, v_UKD))
    out_1HSD = nn.functional.scaled_dot_product_attention(
        q_1HSD, k_1KUD, v_1KUD, attn_mask=mask_SU, is_causal=mask_SU is None, scale=scaling,
        enable_gqa=k_UKD.shape[1] != q_SHD.shape[1],
    )  # fmt: skip
    return out_1HSD[0].transpose(0, 1)


def _has_flash(query: Tensor) -> bool:
    """Whether the flash kernel can run; on meta as on a GPU, which is what a dry run plans for."""
    return query.device.type in ("cuda", "meta") and query.dtype in (torch.float16, torch.bfloat16)


def _flash(
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The flash kernel; `queries` and `keys` are their documents' boundaries and greatest length."""
    from torch.nn.attention.varlen import varlen_attn

    causal, has_gqa = varlen_keywords()
    keywords = dict(causal)
    if window is not None:
        if "window_size" not in keywords:
            raise ValueError("this torch has no sliding window here: set model.attention=sdpa")
        keywords["window_size"] = (window - 1, 0)
    if scaling is not None:
        keywords["scale"] = scaling
    if has_gqa and k_UKD.shape[1] != q_THD.shape[1]:
        keywords["enable_gqa"] = True
    (cu_q, longest_q), (cu_k, longest_k) = queries, keys
    out_THD = varlen_attn(q_THD, k_UKD, v_UKD, cu_q, cu_k, longest_q, longest_k, **keywords)
    assert isinstance(out_THD, Tensor)
    return out_THD


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
