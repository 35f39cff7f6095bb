"""Block-sparse attention: each row of each query head chooses the earlier blocks that it sees.

MoBA's rule (Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", section 2.2),
which has no parameters: a document is cut into blocks from its beginning; a block's key is the mean of
its keys; a row sees its own block up to itself, and the `top_k - 1` earlier blocks whose keys have the
largest products with its query, or all of them where there are not more. Only the last block of a
document can be short, and nobody sees that one as an earlier block, so all means are over whole blocks.
Queries choose head by head, even where they share keys, so a layer's heads can be spread over ranks in
any way. The choice itself has no gradient.

Legend: T rows of all documents, H query heads, K key/value heads (G = H / K), D head dim, N blocks of
all documents, C rows worked on at a time, B rows a block, Q and R tiles of the kernel.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from models.hybrid.documents import Blocks, Documents

SCORES = 2**26
"""So many scores are looked at together."""
TILE = 128
"""Rows and columns of a tile of the flex kernel."""
WORD = 32


@torch.no_grad()
def chosen_blocks(
    q_THD: Tensor, k_TKD: Tensor, documents: Documents, block: int, top_k: int
) -> Tensor:
    """Which blocks each row sees: (H, T, top_k) int64, its own first; -1 where there are no more."""
    T, H = q_THD.shape[:2]
    K = k_TKD.shape[1]
    blocks = documents.blocks(block)
    N = len(blocks.begin_N)
    inside_NB = blocks.begin_N[:, None] + torch.arange(block, device=q_THD.device)
    # gathered, not scattered, so that a sum has one order; short blocks read what nobody looks at
    mean_NKD = k_TKD[inside_NB.clamp(max=T - 1)].mean(1)
    rows = max(SCORES // (H * N), TILE)
    parts = []
    for begin in range(0, T, rows):
        end = min(begin + rows, T)
        low, high = _range_of(documents, begin, end, block)
        q_CKGD = q_THD[begin:end].unflatten(1, (K, H // K))
        scores_KGCN = torch.einsum("ckgd,nkd->kgcn", q_CKGD, mean_NKD[low:high])
        number_N = torch.arange(low, high, device=q_THD.device)
        earlier_CN = (number_N >= blocks.first_T[begin:end, None]) & (
            number_N < blocks.block_T[begin:end, None]
        )
        scores_HCN = scores_KGCN.flatten(0, 1).masked_fill(~earlier_CN, float("-inf"))
        best = scores_HCN.topk(min(top_k - 1, high - low), dim=2)
        chosen_HC = torch.where(best.values > float("-inf"), best.indices + low, -1)
        own_HC1 = blocks.block_T[begin:end, None].expand(H, -1, 1)
        none = chosen_HC.new_full((H, end - begin, top_k - 1 - chosen_HC.shape[2]), -1)
        parts.append(torch.cat([own_HC1, chosen_HC, none], dim=2))
    return torch.cat(parts, dim=1)


def _range_of(documents: Documents, begin: int, end: int, block: int) -> tuple[int, int]:
    """Blocks of the documents that rows `begin` to `end` are in, up to those rows; on the host."""
    low = high = offset = 0
    for length in documents.lengths:
        if offset >= end:
            break
        if offset + length <= begin:
            low += -(-length // block)
            high = low
        else:
            high += -(-min(length, end - offset) // block)
        offset += length
    return low, high


def block_mask(chosen_HTN: Tensor, documents: Documents, block: int) -> list[Tensor]:
    """What `chosen_blocks` means, for each document: (H, L, L), True where a row sees a column."""
    masks = []
    first = 0
    for chosen_HLN in chosen_HTN.split(documents.lengths, dim=1):
        H, L, _ = chosen_HLN.shape
        number = -(-L // block)
        # one more block than there is takes what was not chosen
        local_HLN = torch.where(chosen_HLN < 0, number, chosen_HLN - first)
        seen_HLN = local_HLN.new_zeros(H, L, number + 1, dtype=torch.bool)
        seen_HLN.scatter_(2, local_HLN, True)
        seen_HLL = seen_HLN[:, :, :number].repeat_interleave(block, dim=2)[:, :, :L]
        masks.append(seen_HLL.tril())
        first += number
    return masks


def attend_blocks(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    documents: Documents,
    block: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """Attention under the rule by flex attention, which skips tiles that nobody sees: (T, H, D)."""
    chosen_HTN = chosen_blocks(q_THD, k_TKD, documents, block, top_k)
    mask = flex_mask(chosen_HTN, documents, block)
    q_1HTD, k_1KTD, v_1KTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    flex: Any = _flex(q_THD.device.type == "cuda")
    out_1HTD: Tensor = flex(
        q_1HTD, k_1KTD, v_1KTD, block_mask=mask, scale=scale,
        enable_gqa=q_1HTD.shape[1] != k_1KTD.shape[1],
    )  # fmt: skip
    return out_1HTD[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


@torch.no_grad()
def flex_mask(chosen_HTN: Tensor, documents: Documents, block: int) -> Any:
    """The choice as a mask of flex attention.

    Built from the few chosen blocks; asking about every pair, as `create_block_mask` does, would take
    longer than attention. Inside a tile, a pair is looked up in a bit set of the row's blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    blocks = documents.blocks(block)
    T = chosen_HTN.shape[1]
    local_HTN = torch.where(chosen_HTN < 0, -1, chosen_HTN - blocks.first_T[:, None])
    words_HTW = _bit_sets(local_HTN, -(-documents.longest // block))
    first_T, local_T = blocks.first_T, blocks.block_T - blocks.first_T

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del b
        word = words_HTW[h, q, local_T[k] // WORD]
        return (first_T[q] == first_T[k]) & (k <= q) & ((word >> (local_T[k] % WORD)) & 1 == 1)

    touched_HQR = _touched_tiles(chosen_HTN, blocks, block)
    number_HQ = touched_HQR.sum(2, dtype=torch.int32)
    order_HQR = touched_HQR.int().argsort(dim=2, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        number_HQ[None], order_HQR[None], BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(T, T)
    )


def _bit_sets(local_HTN: Tensor, number: int) -> Tensor:
    """(H, T, W) int32: bit `n % 32` of word `n // 32` says whether a row sees its document's block n.

    `number`: blocks of the longest document.
    """
    word_W = torch.arange(-(-number // WORD), device=local_HTN.device)
    words_HTW = torch.zeros(
        *local_HTN.shape[:2], len(word_W), dtype=torch.int32, device=local_HTN.device
    )
    for local_HT in local_HTN.unbind(2):  # different ones, or -1, which is in no word
        bit_HT = (1 << (local_HT % WORD)).int()
        words_HTW |= torch.where((local_HT // WORD)[..., None] == word_W, bit_HT[..., None], 0)
    return words_HTW


def _touched_tiles(chosen_HTN: Tensor, blocks: Blocks, block: int) -> Tensor:
    """(H, Q, R), True where some row of tile Q sees some row of tile R."""
    H, T, _ = chosen_HTN.shape
    tiles = -(-T // TILE)
    row_tile_T1 = (torch.arange(T, device=chosen_HTN.device) // TILE)[:, None]
    begin_HTN, end_HTN = blocks.begin_N[chosen_HTN], blocks.end_N[chosen_HTN]
    touched = torch.zeros(H, tiles * tiles + 1, dtype=torch.bool, device=chosen_HTN.device)
    for step in range(-(-block // TILE) + 1):
        tile_HTN = begin_HTN // TILE + step
        there_HTN = (chosen_HTN >= 0) & (tile_HTN * TILE < end_HTN) & (tile_HTN <= row_tile_T1)
        place_HTN = torch.where(there_HTN, row_tile_T1 * tiles + tile_HTN, tiles * tiles)
        touched.scatter_(1, place_HTN.flatten(1), True)
    return touched[:, :-1].view(H, tiles, tiles)
