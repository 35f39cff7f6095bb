"""Block-sparse attention: each row of each query head chooses the earlier blocks that it sees.

MoBA's rule (Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", section 2.2),
which has no parameters: a document is cut into blocks from its beginning; a block's key is the mean of
its keys; a row sees its own block up to itself, and the `top_k - 1` earlier blocks whose keys have the
largest products with its query, or all of them where there are not more. Only the last block of a
document can be short, and nobody sees that one as an earlier block, so all means are over whole blocks.
Queries choose head by head, even where they share keys, so a layer's heads can be spread over ranks in
any way. The choice itself has no gradient.

Legend: T rows of all documents, H query heads, K key/value heads (G = H / K), D head dim, N blocks of
all documents, C rows worked on at a time, B rows a block.
"""

import torch
from torch import Tensor

from models.hybrid.documents import Documents
from models.hybrid.gathered import attend_gathered

SCORES = 2**26
"""So many scores are looked at together."""
ROWS = 128
"""Or so many rows, where that is more."""
FEW = 8
"""So many choices are made one by one: torch's `topk` takes several times as long on short rows."""


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
    rows = max(SCORES // (H * N), ROWS)
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
        chosen_HC = _best(scores_HCN, min(top_k - 1, high - low), low)
        own_HC1 = blocks.block_T[begin:end, None].expand(H, -1, 1)
        none = chosen_HC.new_full((H, end - begin, top_k - 1 - chosen_HC.shape[2]), -1)
        parts.append(torch.cat([own_HC1, chosen_HC, none], dim=2))
    return torch.cat(parts, dim=1)


def _best(scores_HCN: Tensor, number: int, first: int) -> Tensor:
    """The `number` best of each row, counted from `first`; -1 where there are no more."""
    if number > FEW:
        values, indices = scores_HCN.topk(number, dim=2)
        return torch.where(values > float("-inf"), indices + first, -1)
    found = []
    for _ in range(number):
        values, indices = scores_HCN.max(dim=2, keepdim=True)
        found.append(torch.where(values > float("-inf"), indices + first, -1))
        scores_HCN.scatter_(2, indices, float("-inf"))
    return (
        torch.cat(found, dim=2) if found else scores_HCN.new_empty(*scores_HCN.shape[:2], 0).long()
    )


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
    """Attention under the rule by flash kernels: (T, H, D)."""
    chosen_HTN = chosen_blocks(q_THD, k_TKD, documents, block, top_k)
    return attend_gathered(q_THD, k_TKD, v_TKD, chosen_HTN[:, :, 1:], documents, block, scale)
