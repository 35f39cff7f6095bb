"""A layer of few rows in three launches, where modules take a dozen.

    attend_token   norm, query, key and value, their turn and their place in the cache, attention
    finish_layer   product of what is seen, sum, norm, product, GELU; then the last product and sum

What takes long here is not to compute but to start, and to wait for memory. So programs are many and
small, and rather work something out again than wait for each other: each has the rows' sum and norm of
its own. Numbers are rounded where the modules round (`models.slide.attention.Layer`).

B users, H heads, E head size, D hidden size, F = 4 * D, R rows, P places of the history, G places that
a list may write, g those that it has, M rows of a program, N columns of a program, K numbers that are
fetched together
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.slide import launches

if TYPE_CHECKING:
    from models.slide.attention import Cache, Layer, Turn


def attend_token(
    layer: "Layer", x_B1D: Tensor, turn: "Turn", cache: "Cache", keys: Tensor, values: Tensor
) -> Tensor:
    """What each user's one token sees (B, 1, D); see `models.slide.attend_triton.attend_next`."""
    k_BHPE, v_BHPE = cache.prefix[layer.number]
    assert k_BHPE.stride(3) == v_BHPE.stride(3) == 1
    B, H, P, E = k_BHPE.shape
    D, G = x_B1D.shape[2], keys.shape[3]
    places, own = max(16, triton.next_power_of_2(P)), triton.next_power_of_2(G)
    tiles = launches.tiles(B)
    users = max(1, min(tiles.users, launches.KEYS * tiles.warps // (max(places, own) * E)))
    seen_B1D = x_B1D.new_empty(B, 1, D)
    _attend[(triton.cdiv(B, users), H)](
        x_B1D.contiguous(), layer.attention_norm.weight, layer.qkv.weight, turn.cos_TE, turn.sin_TE,
        k_BHPE, v_BHPE, cache.valid_BP, keys, values, seen_B1D,
        B, H, P, G, cache.filled, *k_BHPE.stride()[:3], *v_BHPE.stride()[:3],
        *cache.valid_BP.stride(), E**0.5, launches.EPS,
        D=D, E=E, PLACES=places, OWN=own, M=users,
        K=tiles.chunk(2 * E, x_B1D, D), **launches.options(x_B1D, tiles.warps),
    )  # fmt: skip
    return seen_B1D


def finish_layer(layer: "Layer", x_BWD: Tensor, seen_BWD: Tensor) -> Tensor:
    """What the layer makes of a row, and of what it sees: (B, W, D)."""
    D, F = layer.up.weight.shape[1], layer.up.weight.shape[0]
    R = x_BWD.numel() // D
    tiles = launches.tiles(R)
    options = launches.options(x_BWD, tiles.warps)
    chunk, row_tiles = tiles.chunk(D, x_BWD, D), triton.cdiv(R, tiles.rows)
    sum_BWD, wide_BWF = x_BWD.new_empty(x_BWD.shape), x_BWD.new_empty(*x_BWD.shape[:2], F)
    _widen[(row_tiles, F // min(chunk, 64))](
        x_BWD.contiguous(), seen_BWD.contiguous(), layer.out.weight, layer.mlp_norm.weight,
        layer.up.weight, sum_BWD, wide_BWF, R, launches.EPS,
        D=D, F=F, M=tiles.rows, N=min(chunk, 64), K=chunk, **options,
    )  # fmt: skip
    made_BWD = x_BWD.new_empty(x_BWD.shape)
    _narrow[(row_tiles, D // tiles.narrow)](
        sum_BWD, wide_BWF, layer.down.weight, made_BWD, R,
        D=D, F=F, M=tiles.rows, N=tiles.narrow, K=tiles.chunk(4 * tiles.narrow, x_BWD, F),
        **options,
    )  # fmt: skip
    return made_BWD


@triton.jit(do_not_specialize=["g"])
def _attend(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, qkv_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, valid_ptr, keys_ptr, values_ptr, seen_ptr,
    B, H, P, G, g, k_B, k_H, k_P, v_B, v_H, v_P, valid_B, valid_P, root, eps,
    D: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is some users and one head."""
    kind = x_ptr.dtype.element_ty
    user_M, head = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1)
    there_M1 = (user_M < B)[:, None]
    row_M = tl.where(user_M < B, user_M, 0).to(tl.int64)
    at_E, at_P, at_G = tl.arange(0, E), tl.arange(0, PLACES), tl.arange(0, OWN)
    # none of this is written by the kernel before, so it may be fetched while that runs (`follow`)
    inside_1P1 = (at_P < P)[None, :, None]
    valid_MP = tl.load(
        valid_ptr + row_M[:, None] * valid_B + at_P[None, :] * valid_P,
        mask=(at_P < P)[None, :], other=0,
    ) != 0  # fmt: skip
    place_MPE = row_M[:, None, None] * k_B + at_P[None, :, None] * k_P + at_E[None, None, :]
    k_MPE = tl.load(k_ptr + head * k_H + place_MPE, mask=inside_1P1, other=0.0)
    place_MPE = row_M[:, None, None] * v_B + at_P[None, :, None] * v_P + at_E[None, None, :]
    v_MPE = tl.load(v_ptr + head * v_H + place_MPE, mask=inside_1P1, other=0.0)
    own_M1 = ((row_M * H + head) * (G * E))[:, None]
    own_MGE = own_M1[:, :, None] + at_G[None, :, None] * E + at_E[None, None, :]
    before_1G1, newest_1G1 = (at_G < g)[None, :, None], (at_G == g)[None, :, None]
    key_MGE = tl.load(keys_ptr + own_MGE, mask=before_1G1, other=0.0)
    value_MGE = tl.load(values_ptr + own_MGE, mask=before_1G1, other=0.0)
    cos_1E, sin_1E = tl.load(cos_ptr + at_E)[None, :], tl.load(sin_ptr + at_E)[None, :]
    follow(EARLY)
    x_MD = tl.load(x_ptr + row_M[:, None] * D + tl.arange(0, D)[None, :]).to(tl.float32)
    scale_M1 = tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / D + eps)[:, None]
    q_ME = tl.zeros([M, E], tl.float32)
    key_ME = tl.zeros([M, E], tl.float32)
    value_ME = tl.zeros([M, E], tl.float32)
    for begin in range(0, D, K):
        at_K = begin + tl.arange(0, K)
        x_MK = tl.load(x_ptr + row_M[:, None] * D + at_K[None, :]).to(tl.float32)
        x_MK = (x_MK * scale_M1 * tl.load(norm_ptr + at_K)[None, :].to(tl.float32)).to(kind)
        at_KE = head * E * D + at_E[None, :] * D + at_K[:, None]
        q_ME += tl.dot(x_MK, tl.load(qkv_ptr + at_KE), input_precision="ieee")
        key_ME += tl.dot(x_MK, tl.load(qkv_ptr + D * D + at_KE), input_precision="ieee")
        value_ME += tl.dot(x_MK, tl.load(qkv_ptr + 2 * D * D + at_KE), input_precision="ieee")
    q_M1E = _turned(q_ME.to(kind), cos_1E, sin_1E, M, E).to(tl.float32)[:, None, :]
    key_ME = _turned(key_ME.to(kind), cos_1E, sin_1E, M, E)
    value_ME = value_ME.to(kind)
    tl.store(keys_ptr + own_M1 + g * E + at_E[None, :], key_ME, mask=there_M1)
    tl.store(values_ptr + own_M1 + g * E + at_E[None, :], value_ME, mask=there_M1)
    # of the list's own places, the newest is not read back
    key_MGE = tl.where(newest_1G1, key_ME[:, None, :], key_MGE)
    value_MGE = tl.where(newest_1G1, value_ME[:, None, :], value_MGE)
    score_MP = tl.sum(q_M1E * k_MPE.to(tl.float32), axis=2).to(kind).to(tl.float32)
    score_MP = tl.where(valid_MP, (score_MP / root).to(kind).to(tl.float32), float("-inf"))
    score_MG = tl.sum(q_M1E * key_MGE.to(tl.float32), axis=2).to(kind).to(tl.float32)
    score_MG = (score_MG / root).to(kind).to(tl.float32)
    score_MG = tl.where((at_G <= g)[None, :], score_MG, float("-inf"))
    most_M1 = tl.maximum(tl.max(score_MP, axis=1), tl.max(score_MG, axis=1))[:, None]
    weight_MP, weight_MG = tl.exp(score_MP - most_M1), tl.exp(score_MG - most_M1)
    sum_M1 = (tl.sum(weight_MP, axis=1) + tl.sum(weight_MG, axis=1))[:, None]
    weight_MP = (weight_MP / sum_M1).to(kind).to(tl.float32)
    weight_MG = (weight_MG / sum_M1).to(kind).to(tl.float32)
    seen_ME = tl.sum(weight_MP[:, :, None] * v_MPE.to(tl.float32), axis=1).to(kind)
    own_ME = tl.sum(weight_MG[:, :, None] * value_MGE.to(tl.float32), axis=1).to(kind)
    seen_ME = (seen_ME.to(tl.float32) + own_ME.to(tl.float32)).to(kind)
    tl.store(seen_ptr + row_M[:, None] * D + head * E + at_E[None, :], seen_ME, mask=there_M1)


@triton.jit
def _widen(  # type: ignore[no-untyped-def]
    x_ptr, seen_ptr, out_ptr, norm_ptr, up_ptr, sum_ptr, wide_ptr, R, eps,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """All columns of the sum, since its norm needs them, and some of the hidden layer."""
    kind = x_ptr.dtype.element_ty
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M1 = (row_M < R)[:, None]
    at_M1 = tl.where(row_M < R, row_M, 0)[:, None]
    at_D, at_N = tl.arange(0, D), tl.program_id(1) * N + tl.arange(0, N)
    up_DN = tl.load(up_ptr + at_N[None, :] * D + at_D[:, None])
    follow(EARLY)
    x_MD = tl.load(x_ptr + at_M1 * D + at_D[None, :]).to(tl.float32)
    added_MD = _product(seen_ptr, at_M1, out_ptr, at_D, D, M, D, K)
    x_MD = (x_MD + added_MD.to(kind).to(tl.float32)).to(kind)
    if tl.program_id(1) == 0:
        tl.store(sum_ptr + at_M1 * D + at_D[None, :], x_MD, mask=there_M1)
    x_MD = normal(x_MD.to(tl.float32), eps, D) * tl.load(norm_ptr + at_D)[None, :].to(tl.float32)
    wide_MN = tl.dot(x_MD.to(kind), up_DN, input_precision="ieee").to(kind).to(tl.float32)
    tl.store(wide_ptr + at_M1 * F + at_N[None, :], gelu(wide_MN).to(kind), mask=there_M1)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    sum_ptr, wide_ptr, down_ptr, made_ptr, R,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of some rows."""
    kind = sum_ptr.dtype.element_ty
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M1 = (row_M < R)[:, None]
    at_M1 = tl.where(row_M < R, row_M, 0)[:, None]
    at_N = tl.program_id(1) * N + tl.arange(0, N)
    follow(EARLY)
    x_MN = tl.load(sum_ptr + at_M1 * D + at_N[None, :]).to(tl.float32)
    added_MN = _product(wide_ptr, at_M1, down_ptr, at_N, F, M, N, K)
    x_MN = (x_MN + added_MN.to(kind).to(tl.float32)).to(kind)
    tl.store(made_ptr + at_M1 * D + at_N[None, :], x_MN, mask=there_M1)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    rows_ptr, at_M1, weight_ptr, at_N, X: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Some rows of X numbers, times some rows of a weight of so many."""
    sum_MN = tl.zeros([M, N], tl.float32)
    for begin in range(0, X, K):
        at_K = begin + tl.arange(0, K)
        rows_MK = tl.load(rows_ptr + at_M1 * X + at_K[None, :])
        weight_KN = tl.load(weight_ptr + at_N[None, :] * X + at_K[:, None])
        sum_MN += tl.dot(rows_MK, weight_KN, input_precision="ieee")
    return sum_MN


@triton.jit
def _turned(x_ME, cos_1E, sin_1E, M: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of numbers, turned by their place (`models.slide.attention.rotate`)."""
    kind = x_ME.dtype
    low, high = tl.split(tl.permute(tl.reshape(x_ME, [M, 2, E // 2]), [0, 2, 1]))
    swapped_ME = tl.reshape(tl.permute(tl.join(high, low), [0, 2, 1]), [M, E])
    straight_ME = (x_ME.to(tl.float32) * cos_1E.to(tl.float32)).to(kind).to(tl.float32)
    return (straight_ME + swapped_ME.to(tl.float32) * sin_1E.to(tl.float32)).to(kind)


@triton.jit
def normal(x_MD, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows with a mean square of one."""
    return x_MD * tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / D + eps)[:, None]


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """Without the approximation by tanh."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def follow(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What comes next needs what the kernel before has written; the one after may be set up.

    As each kernel waits before it lets the next one start, all before the kernel before have ended. So
    what they wrote may be read ahead of this, and nothing may be written.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
