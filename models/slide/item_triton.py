"""An item of a list in a few launches: all heads of a model with heads, the trie, and what is not left.

Between two passes of the layers, greedy decoding of an item is L small networks, L walks of the trie and
a choice: some eighty small kernels, which take longer to start than to run. Here two do a level,

    _inner    what was chosen before, and the hidden layer of the level's network: some of its columns
    _logits   the network's end, and some of the codes: which are left, the likeliest of them, a sum

and `_finish` chooses the last code and the item. Many programs share the weights, and each works out
again what all of them need. Numbers are rounded where the modules round (`models.slide.heads`,
`models.slide.decode`), so both write the same lists, but for what the order of a sum turns in a tie.

B users, U used items (K of which are the list's own), L levels, C codes, D hidden size, T tiles of
codes, M users of a program, N codes or columns of a program, n numbers that are fetched together
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.slide import launches
from models.slide.decode import Lists, used_codes
from models.slide.heads import SlideHeads
from models.slide.history import NOTHING, tokens_of
from models.slide.layer_triton import follow, gelu, normal
from models.slide.trie import Trie

USED = 16
"""Used items that are looked at together."""


class Steps(NamedTuple):
    """Where the programs of an item leave things for each other."""

    x_BD: Tensor
    """What a level's head reads."""
    inner_BD: Tensor
    """The hidden layer of its network."""
    sums_3TB: Tensor
    """Of a tile's codes: the highest logit, the sum of exponentials, and the highest that is left."""
    best_TB: Tensor
    """And which code that is."""
    code_LB: Tensor
    """What was chosen, ..."""
    state_LB: Tensor
    """... where it leads to, ..."""
    total_LB: Tensor
    """... and log-probabilities up to there."""


@torch.no_grad()
def write_list(
    model: SlideHeads, trie: Trie, items_BH: Tensor, length: int, exclude_BU: Tensor
) -> Lists:
    """What `greedy_list` writes of one model, constrained and with feedback."""
    assert trie.child_NC is not None
    B, U = exclude_BU.shape
    tokens_BP, cache = tokens_of(model, trie, items_BH, length * trie.levels)
    used_BU = torch.cat([exclude_BU, exclude_BU.new_full((B, length), NOTHING)], dim=1)
    codes_BUL = used_codes(trie, used_BU).contiguous()
    hidden_BD = model.read_history(tokens_BP, cache)[:, 0].contiguous()
    steps = _steps(hidden_BD, trie)
    item_BD, scores_KB = torch.empty_like(hidden_BD), steps.total_LB.new_empty(length, B)
    slots_KD = model.slot_vectors(length).expand(length, hidden_BD.shape[1])
    for slot in range(length):
        _choose(model, trie, steps, hidden_BD, used_BU, codes_BUL, U + slot)
        _finish[(B,)](
            trie.child_NC, trie.leaf_items_FR, model.tokens_VD, slots_KD[slot],
            *steps[2:], used_BU, codes_BUL, item_BD, scores_KB[slot],
            B, U + slot, U + length, _tiles_of(trie.sizes[-1], B), trie.first_leaf,
            trie.child_NC.shape[1], trie.leaf_items_FR.shape[1], slots_KD.stride(1),
            OFFSETS=tuple(model.offsets), L=trie.levels, D=hidden_BD.shape[1],
            TILES=triton.next_power_of_2(_tiles_of(trie.sizes[-1], B)),
            USED=triton.next_power_of_2(U + length), **launches.options(hidden_BD, 1),
        )  # fmt: skip
        if slot + 1 < length:
            hidden_BD = model.read_item(item_BD[:, None], cache)[:, 0].contiguous()
    return Lists(used_BU[:, U:], scores_KB.T)


def _tiles_of(codes: int, users: int) -> int:
    return int(triton.cdiv(codes, launches.tiles(users).codes))


def _steps(hidden_BD: Tensor, trie: Trie) -> Steps:
    B, L, T = len(hidden_BD), trie.levels, _tiles_of(max(trie.sizes), len(hidden_BD))
    return Steps(
        x_BD=torch.empty_like(hidden_BD),
        inner_BD=torch.empty_like(hidden_BD),
        sums_3TB=hidden_BD.new_empty(3, T, B, dtype=torch.float32),
        best_TB=trie.codes_IL.new_empty(T, B),
        code_LB=trie.codes_IL.new_empty(L, B),
        state_LB=trie.codes_IL.new_empty(L, B),
        total_LB=hidden_BD.new_empty(L, B, dtype=torch.float32),
    )


def _choose(
    model: SlideHeads, trie: Trie, steps: Steps, hidden_BD: Tensor, used_BU: Tensor, codes_BUL: Tensor,
    used: int,
) -> None:  # fmt: skip
    """Codes of an item but for the last choice, which is left to `_finish`."""
    assert trie.child_NC is not None
    B, D = hidden_BD.shape
    tiles, C = launches.tiles(B), trie.child_NC.shape[1]
    chunk = tiles.chunk(D, hidden_BD, D)
    options = launches.options(hidden_BD, tiles.warps)
    out_VD = model.tokens_VD if model.out_VD is None else model.out_VD
    for level, size in enumerate(trie.sizes):
        before = _tiles_of(trie.sizes[level - 1], B)
        _inner[(triton.cdiv(B, tiles.rows), triton.cdiv(D, 32))](
            hidden_BD, model.up_LDD[level], model.chosen_VD, trie.child_NC, *steps,
            B, before, C, launches.EPS,
            OFFSETS=tuple(model.offsets), LEVEL=level, TILES=triton.next_power_of_2(before),
            D=D, M=tiles.rows, N=32, **options,
        )  # fmt: skip
        _logits[(triton.cdiv(B, tiles.rows), _tiles_of(size, B))](
            model.down_LDD[level], out_VD, trie.child_NC, trie.items_S, used_BU, codes_BUL, *steps[:-1],
            B, used, used_BU.shape[1], size, C, model.offsets[level],
            L=trie.levels, LEVEL=level, D=D, M=tiles.rows, N=tiles.codes, n=chunk, USED=USED, **options,
        )  # fmt: skip


@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    hidden_ptr, up_ptr, chosen_ptr, child_ptr,
    x_ptr, inner_ptr, sums_ptr, best_ptr, code_ptr, state_ptr, total_ptr,
    B, T, CODES, eps,
    OFFSETS: tl.constexpr, LEVEL: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every program chooses the code before, and one of them says so."""
    kind = hidden_ptr.dtype.element_ty
    user_M = tl.program_id(0) * M + tl.arange(0, M)
    row_M = tl.where(user_M < B, user_M, 0).to(tl.int64)
    at_D, at_N = tl.arange(0, D), tl.program_id(1) * N + tl.arange(0, N)
    there_M = user_M < B
    up_DN = tl.load(up_ptr + at_D[:, None] * D + at_N[None, :])
    follow(EARLY)
    x_MD = tl.load(hidden_ptr + row_M[:, None] * D + at_D[None, :]).to(tl.float32)
    if LEVEL > 0:
        code_M, state_M, total_M = _choice(
            sums_ptr, best_ptr, state_ptr, total_ptr, child_ptr, row_M, B, T, CODES, TILES, LEVEL - 1
        )  # fmt: skip
        if tl.program_id(1) == 0:
            at_M = (LEVEL - 1) * B + row_M
            tl.store(code_ptr + at_M, code_M, mask=there_M)
            tl.store(state_ptr + at_M, state_M, mask=there_M)
            tl.store(total_ptr + at_M, total_M, mask=there_M)
        told_MD = _vectors(chosen_ptr, code_ptr, code_M, row_M, B, OFFSETS, LEVEL, D)
        x_MD = (x_MD + told_MD).to(kind).to(tl.float32)
    x_MD = normal(x_MD, eps, D).to(kind)
    if tl.program_id(1) == 0:
        tl.store(x_ptr + row_M[:, None] * D + at_D[None, :], x_MD, mask=there_M[:, None])
    inner_MN = tl.dot(x_MD, up_DN, input_precision="ieee").to(kind).to(tl.float32)
    at_MN = row_M[:, None] * D + at_N[None, :]
    tl.store(inner_ptr + at_MN, gelu(inner_MN).to(kind), mask=there_M[:, None])


@triton.jit(do_not_specialize=["U"])
def _logits(  # type: ignore[no-untyped-def]
    down_ptr, out_ptr, child_ptr, items_ptr, used_ptr, used_codes_ptr,
    x_ptr, inner_ptr, sums_ptr, best_ptr, code_ptr, state_ptr,
    B, U, PITCH, SIZE, CODES, offset,
    L: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    n: tl.constexpr, USED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`U` items are used so far. A code is left if more items are below it than are used."""
    kind = x_ptr.dtype.element_ty
    user_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M1 = (user_M < B)[:, None]
    row_M = tl.where(user_M < B, user_M, 0).to(tl.int64)
    at_D, code_N = tl.arange(0, D), tl.program_id(1) * N + tl.arange(0, N)
    is_code_1N = (code_N < SIZE)[None, :]
    row_1N = (offset + code_N).to(tl.int64)[None, :]
    out_DN = tl.load(out_ptr + row_1N * D + at_D[:, None], mask=is_code_1N, other=0.0)
    follow(EARLY)
    state_M = tl.zeros([M], tl.int64)
    if LEVEL > 0:
        state_M = tl.load(state_ptr + (LEVEL - 1) * B + row_M)
    child_MN = tl.load(
        child_ptr + state_M[:, None] * CODES + code_N[None, :], mask=is_code_1N, other=-1
    )
    x_MD = tl.load(x_ptr + row_M[:, None] * D + at_D[None, :]).to(tl.float32)
    added_MD = tl.zeros([M, D], tl.float32)
    for begin in range(0, D, n):
        at_n = begin + tl.arange(0, n)
        inner_Mn = tl.load(inner_ptr + row_M[:, None] * D + at_n[None, :])
        down_nD = tl.load(down_ptr + at_n[:, None] * D + at_D[None, :])
        added_MD += tl.dot(inner_Mn, down_nD, input_precision="ieee")
    x_MD = (x_MD + added_MD.to(kind).to(tl.float32)).to(kind)
    left_MN = tl.load(items_ptr + tl.maximum(child_MN, 0))
    logits_MN = tl.dot(x_MD, out_DN, input_precision="ieee").to(kind).to(tl.float32)
    logits_MN = tl.where(is_code_1N, logits_MN, float("-inf"))
    most_M = tl.max(logits_MN, axis=1)
    sum_M = tl.sum(tl.exp(logits_MN - most_M[:, None]), axis=1)
    for begin in range(0, U, USED):
        at_U = begin + tl.arange(0, USED)
        place_MU, known_MU = row_M[:, None] * PITCH + at_U[None, :], there_M1 & (at_U < U)[None, :]
        below_MU = tl.load(used_ptr + place_MU, mask=known_MU, other=-1) >= 0
        for level in tl.static_range(LEVEL):
            its_MU = tl.load(used_codes_ptr + place_MU * L + level, mask=known_MU, other=-1)
            below_MU = below_MU & (its_MU == tl.load(code_ptr + level * B + row_M)[:, None])
        its_MU = tl.load(used_codes_ptr + place_MU * L + LEVEL, mask=known_MU, other=-1)
        match_MUN = (its_MU[:, :, None] == code_N[None, None, :]) & below_MU[:, :, None]
        left_MN -= tl.sum(match_MUN.to(tl.int32), axis=1)
    logits_MN = tl.where((child_MN >= 0) & (left_MN > 0), logits_MN, float("-inf"))
    best_M = (tl.program_id(1) * N + tl.argmax(logits_MN, axis=1)).to(tl.int64)
    at_M, T = tl.program_id(1) * B + row_M, tl.num_programs(1)
    tl.store(sums_ptr + at_M, most_M, mask=user_M < B)
    tl.store(sums_ptr + T * B + at_M, sum_M, mask=user_M < B)
    tl.store(sums_ptr + 2 * T * B + at_M, tl.max(logits_MN, axis=1), mask=user_M < B)
    tl.store(best_ptr + at_M, best_M, mask=user_M < B)


@triton.jit(do_not_specialize=["U"])
def _finish(  # type: ignore[no-untyped-def]
    child_ptr, leaf_items_ptr, tokens_ptr, slot_ptr,
    sums_ptr, best_ptr, code_ptr, state_ptr, total_ptr, used_ptr, used_codes_ptr, item_ptr, score_ptr,
    B, U, PITCH, T, first_leaf, CODES, LEAF, slot_D,
    OFFSETS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr,
    USED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is one user, whose next item is the first with these codes that is not used."""
    kind = item_ptr.dtype.element_ty
    row_1 = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    at_D, at_U = tl.arange(0, D), tl.arange(0, USED)
    slot_1D = tl.load(slot_ptr + at_D * slot_D)[None, :].to(tl.float32)
    follow(EARLY)
    used_1U = tl.load(
        used_ptr + row_1[:, None] * PITCH + at_U[None, :], mask=(at_U < U)[None, :], other=-1
    )
    code_1, state_1, total_1 = _choice(
        sums_ptr, best_ptr, state_ptr, total_ptr, child_ptr, row_1, B, T, CODES, TILES, L - 1
    )
    item_1D = _vectors(tokens_ptr, code_ptr, code_1, row_1, B, OFFSETS, L, D)
    item_1D = (item_1D + slot_1D).to(kind)
    tl.store(item_ptr + row_1[:, None] * D + at_D[None, :], item_1D)
    leaf_1 = tl.maximum(state_1 - first_leaf, 0)
    picked_1 = tl.full([1], -1, tl.int64)
    for place in range(0, LEAF):
        one_1 = tl.load(leaf_items_ptr + leaf_1 * LEAF + place)
        taken_1 = tl.max((used_1U == one_1[:, None]).to(tl.int32), axis=1) > 0
        picked_1 = tl.where((picked_1 < 0) & (one_1 >= 0) & (taken_1 == 0), one_1, picked_1)
    found_1 = (total_1 > float("-inf")) & (state_1 >= first_leaf)
    tl.store(used_ptr + row_1 * PITCH + U, tl.where(found_1, picked_1, -1))
    for level in tl.static_range(L):
        its_1 = code_1
        if level + 1 < L:
            its_1 = tl.load(code_ptr + level * B + row_1)
        tl.store(used_codes_ptr + (row_1 * PITCH + U) * L + level, its_1)
    tl.store(score_ptr + row_1, total_1)


@triton.jit
def _choice(  # type: ignore[no-untyped-def]
    sums_ptr, best_ptr, state_ptr, total_ptr, child_ptr, row_M, B, T, CODES,
    TILES: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """Of the tiles of a level: the code, the state it leads to, and log-probabilities up to there."""
    at_T = tl.arange(0, TILES)
    place_MT, in_1T = at_T[None, :] * B + row_M[:, None], (at_T < T)[None, :]
    most_MT = tl.load(sums_ptr + place_MT, mask=in_1T, other=float("-inf"))
    sum_MT = tl.load(sums_ptr + T * B + place_MT, mask=in_1T, other=0.0)
    left_MT = tl.load(sums_ptr + 2 * T * B + place_MT, mask=in_1T, other=float("-inf"))
    best_MT = tl.load(best_ptr + place_MT, mask=in_1T, other=0)
    most_M = tl.max(most_MT, axis=1)
    sum_M = tl.sum(sum_MT * tl.exp(most_MT - most_M[:, None]), axis=1)
    total_M = tl.max(left_MT, axis=1) - (most_M + tl.log(sum_M))
    first_M1 = tl.argmax(left_MT, axis=1)[:, None]
    code_M = tl.sum(tl.where(at_T[None, :] == first_M1, best_MT, 0), axis=1)
    state_M = tl.zeros_like(row_M)
    if LEVEL > 0:
        total_M += tl.load(total_ptr + (LEVEL - 1) * B + row_M)
        state_M = tl.load(state_ptr + (LEVEL - 1) * B + row_M)
    child_M = tl.load(child_ptr + state_M * CODES + code_M)
    return code_M, tl.maximum(child_M, 0).to(tl.int64), total_M


@triton.jit
def _vectors(  # type: ignore[no-untyped-def]
    table_ptr, code_ptr, newest_M, row_M, B, OFFSETS: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The sum of the first `COUNT` codes' rows, the last of which are `newest`."""
    kind = table_ptr.dtype.element_ty
    at_D = tl.arange(0, D)
    sum_MD = tl.zeros([row_M.shape[0], D], tl.float32)
    for level in tl.static_range(COUNT):
        code_M = newest_M
        if level + 1 < COUNT:
            code_M = tl.load(code_ptr + level * B + row_M)
        one_MD = tl.load(table_ptr + (OFFSETS[level] + code_M)[:, None] * D + at_D[None, :])
        sum_MD = (sum_MD + one_MD.to(tl.float32)).to(kind).to(tl.float32)
    return sum_MD
