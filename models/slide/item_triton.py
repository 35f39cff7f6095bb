"""An item of a list in one launch: all heads of a model with heads, the trie, and what is not left.

Between two passes of the layers, greedy decoding of an item is L small networks, L walks of the trie and
a choice: some eighty small kernels, which take longer to start than to run. Here one kernel does them
for 16 users a program, and rounds where the modules round (`models.slide.heads`, `models.slide.decode`),
so that both write the same lists, but for what the order of a sum may turn in a tie.

B users, U used items (K of which are the list's own), L levels, C codes, D hidden size, M users of a
program, n codes or columns that are worked out together
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.slide.decode import Lists, used_codes
from models.slide.heads import SlideHeads
from models.slide.history import NOTHING, read_history
from models.slide.trie import Trie

USERS = 16
"""Of a program, the fewest rows that a matrix product has."""
CHUNK = 32
"""Columns of the hidden layer, and codes, that are worked out together."""
WARPS = 8


@torch.no_grad()
def write_list(
    model: SlideHeads, trie: Trie, items_BH: Tensor, length: int, exclude_BU: Tensor
) -> Lists:
    """What `greedy_list` writes of one model, constrained and with feedback."""
    assert trie.child_NC is not None
    B, U = exclude_BU.shape
    cache, _ = read_history(model, trie, items_BH, length * trie.levels)
    used_BU = torch.cat([exclude_BU, exclude_BU.new_full((B, length), NOTHING)], dim=1)
    codes_BUL = used_codes(trie, used_BU).contiguous()
    hidden_BD = cache.written.hidden_BWD[:, 0].contiguous()
    item_BD, scores_KB = torch.empty_like(hidden_BD), hidden_BD.new_empty(length, B).float()
    out_VD = model.tokens_VD if model.out_VD is None else model.out_VD
    slots_KD = model.slot_vectors(length)
    for slot in range(length):
        _item[(triton.cdiv(B, USERS),)](
            hidden_BD, model.up_LDD, model.down_LDD, model.chosen_VD, model.tokens_VD, out_VD,
            trie.child_NC, trie.items_S, trie.leaf_items_FR, trie.codes_IL,
            used_BU, codes_BUL, item_BD, scores_KB[slot],
            B, U + slot, U + length, trie.first_leaf, trie.child_NC.shape[1],
            trie.leaf_items_FR.shape[1], torch.finfo(hidden_BD.dtype).eps,
            SIZES=tuple(trie.sizes), OFFSETS=tuple(model.offsets), L=trie.levels,
            D=item_BD.shape[1], USED=triton.next_power_of_2(U + length), M=USERS, CHUNK=CHUNK,
            num_warps=WARPS,
        )  # fmt: skip
        if slot + 1 < length:
            read_B1D = model.read_item((item_BD + slots_KD[slot])[:, None], cache)
            hidden_BD = read_B1D[:, 0].contiguous()
    return Lists(used_BU[:, U:], scores_KB.T)


@triton.jit(do_not_specialize=["U"])
def _item(  # type: ignore[no-untyped-def]
    hidden_ptr, up_ptr, down_ptr, chosen_ptr, tokens_ptr, out_ptr,
    child_ptr, items_ptr, leaf_items_ptr, codes_of_ptr,
    used_ptr, used_codes_ptr, item_ptr, score_ptr,
    B, U, PITCH, first_leaf, CODES, LEAF, eps,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, L: tl.constexpr, D: tl.constexpr,
    USED: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """See the module's text. `U` items are used so far, and the one that is chosen becomes the next."""
    kind = hidden_ptr.dtype.element_ty
    user_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M = user_M < B
    at_D, at_n = tl.arange(0, D), tl.arange(0, CHUNK)
    at_U = tl.arange(0, USED)
    row_M = tl.where(there_M, user_M, 0).to(tl.int64)
    known_MU = there_M[:, None] & (at_U < U)[None, :]
    used_MU = tl.load(used_ptr + row_M[:, None] * PITCH + at_U[None, :], mask=known_MU, other=-1)
    below_MU = used_MU >= 0
    hidden_MD = tl.load(hidden_ptr + row_M[:, None] * D + at_D[None, :]).to(tl.float32)
    chosen_MD = tl.zeros([M, D], tl.float32)
    item_MD = tl.zeros([M, D], tl.float32)
    state_M = tl.zeros([M], tl.int64)
    total_M = tl.zeros([M], tl.float32)
    for level in tl.static_range(L):
        offset = OFFSETS[level]
        size = SIZES[level]
        # the level's head: normalized, plus a small network of that
        x_MD = (hidden_MD + chosen_MD).to(kind).to(tl.float32)
        scale_M = tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / D + eps)
        x_MD = (x_MD * scale_M[:, None]).to(kind)
        added_MD = tl.zeros([M, D], tl.float32)
        for begin in range(0, D, CHUNK):
            up_Dn = tl.load(up_ptr + level * D * D + at_D[:, None] * D + (begin + at_n)[None, :])
            inner_Mn = tl.dot(x_MD, up_Dn, input_precision="ieee").to(kind).to(tl.float32)
            inner_Mn = 0.5 * inner_Mn * (1.0 + tl.erf(inner_Mn * 0.7071067811865476))
            down_nD = tl.load(
                down_ptr + level * D * D + (begin + at_n)[:, None] * D + at_D[None, :]
            )
            added_MD += tl.dot(inner_Mn.to(kind), down_nD, input_precision="ieee")
        x_MD = (x_MD.to(tl.float32) + added_MD.to(kind).to(tl.float32)).to(kind)
        # the likeliest code that is left, and the sum over all codes
        codes_MU = tl.load(
            used_codes_ptr + (row_M[:, None] * PITCH + at_U[None, :]) * L + level,
            mask=known_MU, other=-1,
        )  # fmt: skip
        most_M = tl.full([M], float("-inf"), tl.float32)
        sum_M = tl.zeros([M], tl.float32)
        best_M = tl.full([M], float("-inf"), tl.float32)
        code_M = tl.zeros([M], tl.int64)
        for begin in range(0, size, CHUNK):
            code_n = begin + at_n
            is_code_n = code_n < size
            rows_nD = tl.load(
                out_ptr + (offset + code_n)[:, None] * D + at_D[None, :],
                mask=is_code_n[:, None], other=0.0,
            )  # fmt: skip
            logits_Mn = tl.dot(x_MD, tl.trans(rows_nD), input_precision="ieee").to(kind)
            logits_Mn = tl.where(is_code_n[None, :], logits_Mn.to(tl.float32), float("-inf"))
            higher_M = tl.maximum(most_M, tl.max(logits_Mn, axis=1))
            sum_M = sum_M * tl.exp(most_M - higher_M)
            sum_M += tl.sum(tl.exp(logits_Mn - higher_M[:, None]), axis=1)
            most_M = higher_M
            child_Mn = tl.load(
                child_ptr + state_M[:, None] * CODES + code_n[None, :],
                mask=is_code_n[None, :], other=-1,
            )  # fmt: skip
            items_Mn = tl.load(items_ptr + tl.maximum(child_Mn, 0))
            match_MUn = (codes_MU[:, :, None] == code_n[None, None, :]) & below_MU[:, :, None]
            left_Mn = (child_Mn >= 0) & (items_Mn > tl.sum(match_MUn.to(tl.int32), axis=1))
            logits_Mn = tl.where(left_Mn, logits_Mn, float("-inf"))
            found_M = tl.max(logits_Mn, axis=1)
            where_M = (begin + tl.argmax(logits_Mn, axis=1)).to(tl.int64)
            code_M = tl.where(found_M > best_M, where_M, code_M)
            best_M = tl.maximum(best_M, found_M)
        total_M += best_M - (most_M + tl.log(sum_M))
        child_M = tl.load(child_ptr + state_M * CODES + code_M)
        state_M = tl.maximum(child_M, 0).to(tl.int64)
        below_MU = below_MU & (codes_MU == code_M[:, None])
        token_MD = (offset + code_M)[:, None] * D + at_D[None, :]
        item_MD = (item_MD + tl.load(tokens_ptr + token_MD).to(tl.float32)).to(kind).to(tl.float32)
        told_MD = tl.load(chosen_ptr + token_MD).to(tl.float32)
        chosen_MD = (chosen_MD + told_MD).to(kind).to(tl.float32)
    # of the items with these codes, the first that is not used
    leaf_M = tl.maximum(state_M - first_leaf, 0)
    picked_M = tl.full([M], -1, tl.int64)
    for place in range(0, LEAF):
        one_M = tl.load(leaf_items_ptr + leaf_M * LEAF + place)
        taken_M = tl.max((used_MU == one_M[:, None]).to(tl.int32), axis=1) > 0
        picked_M = tl.where((picked_M < 0) & (one_M >= 0) & (taken_M == 0), one_M, picked_M)
    found_M = (total_M > float("-inf")) & (state_M >= first_leaf)
    tl.store(used_ptr + row_M * PITCH + U, tl.where(found_M, picked_M, -1), mask=there_M)
    for level in tl.static_range(L):
        its_code_M = tl.load(codes_of_ptr + tl.maximum(picked_M, 0) * L + level)
        tl.store(used_codes_ptr + (row_M * PITCH + U) * L + level, its_code_M, mask=there_M)
    tl.store(score_ptr + user_M, total_M, mask=there_M)
    tl.store(item_ptr + row_M[:, None] * D + at_D[None, :], item_MD.to(kind), mask=there_M[:, None])
