"""One token of each beam, from its projection to what it sees, in one launch.

It turns query and key, puts key and value into the beam's own places, and attends to the user's history
and to what the beam has written: `models.slide.attention.Layer` without a cache of the kernels between,
and rounded where those round.

B users, H heads, W beams, E head size, P places of the history, G places that a beam may write, g those
that it has, M beams of a program
"""

import triton
import triton.language as tl
from torch import Tensor

from models.slide.attention import Cache, Turn

BEAMS = 16
"""Of a program, the fewest rows that a matrix product has."""


def attend_next(
    qkv_BWF: Tensor, turn: Turn, cache: Cache, layer: int, keys: Tensor, values: Tensor
) -> Tensor:
    """What each beam sees, (B, W, H * E).

    F = 3 * H * E. Its key and value go to place `cache.filled` of `keys` and `values`, which are
    (B, H, W, G, E) and contiguous.
    """
    k_BHPE, v_BHPE = cache.prefix[layer]
    assert k_BHPE.stride(3) == v_BHPE.stride(3) == 1
    B, H, W, G, E = keys.shape
    P = k_BHPE.shape[2]
    seen_BWD = qkv_BWF.new_empty(B, W, H * E)
    _attend[(B * H, triton.cdiv(W, BEAMS))](
        qkv_BWF.contiguous(), turn.cos_TE, turn.sin_TE, k_BHPE, v_BHPE, cache.valid_BP, keys, values,
        seen_BWD, W, H, P, G, cache.filled, *k_BHPE.stride()[:3], *v_BHPE.stride()[:3],
        cache.valid_BP.stride(0), cache.valid_BP.stride(1), E**0.5,
        E=E, PLACES=max(16, triton.next_power_of_2(P)), OWN=triton.next_power_of_2(G), M=BEAMS,
    )  # fmt: skip
    return seen_BWD


@triton.jit(do_not_specialize=["g"])
def _attend(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, valid_ptr, keys_ptr, values_ptr, seen_ptr,
    W, H, P, G, g, k_B, k_H, k_P, v_B, v_H, v_P, valid_B, valid_P, root,
    E: tl.constexpr, PLACES: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """See the module's text; a program is some beams of one user and head."""
    kind = qkv_ptr.dtype.element_ty
    user, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    beam_M = tl.program_id(1) * M + tl.arange(0, M)
    there_M1 = (beam_M < W)[:, None]
    beam_M = tl.where(beam_M < W, beam_M, 0)
    at_E, at_P, at_G = tl.arange(0, E), tl.arange(0, PLACES), tl.arange(0, OWN)
    row_M1 = (user * W + beam_M)[:, None] * (3 * H * E) + head * E
    cos_1E, sin_1E = tl.load(cos_ptr + at_E)[None, :], tl.load(sin_ptr + at_E)[None, :]
    other_E = (at_E + E // 2) % E
    q_ME = _turned(qkv_ptr + row_M1, at_E, other_E, cos_1E, sin_1E)
    k_ME = _turned(qkv_ptr + row_M1 + H * E, at_E, other_E, cos_1E, sin_1E)
    v_ME = tl.load(qkv_ptr + row_M1 + 2 * H * E + at_E[None, :])
    own_M1 = ((user * H + head) * W + beam_M)[:, None] * (G * E)
    tl.store(keys_ptr + own_M1 + g * E + at_E[None, :], k_ME, mask=there_M1)
    tl.store(values_ptr + own_M1 + g * E + at_E[None, :], v_ME, mask=there_M1)
    # scores of the history, and of the beam's own places, the newest of which is not read back
    inside_P = at_P < P
    valid_P = tl.load(valid_ptr + user * valid_B + at_P * valid_P, mask=inside_P, other=0) != 0
    place_PE = at_P[:, None] * k_P + at_E[None, :]
    k_PE = tl.load(k_ptr + user * k_B + head * k_H + place_PE, mask=inside_P[:, None], other=0.0)
    score_MP = tl.dot(q_ME, tl.trans(k_PE), input_precision="ieee").to(kind).to(tl.float32)
    score_MP = tl.where(valid_P[None, :], (score_MP / root).to(kind).to(tl.float32), float("-inf"))
    wide_ME = q_ME.to(tl.float32)
    score_M = tl.sum(wide_ME * k_ME.to(tl.float32), axis=1).to(kind).to(tl.float32)
    score_MG = tl.where((at_G == g)[None, :], score_M[:, None], float("-inf"))
    for place in range(0, g):
        one_ME = tl.load(keys_ptr + own_M1 + place * E + at_E[None, :]).to(tl.float32)
        score_M = tl.sum(wide_ME * one_ME, axis=1).to(kind).to(tl.float32)
        score_MG = tl.where((at_G == place)[None, :], score_M[:, None], score_MG)
    score_MG = (score_MG / root).to(kind).to(tl.float32)
    most_M = tl.maximum(tl.max(score_MP, axis=1), tl.max(score_MG, axis=1))
    weight_MP = tl.exp(score_MP - most_M[:, None])
    weight_MG = tl.exp(score_MG - most_M[:, None])
    sum_M = tl.sum(weight_MP, axis=1) + tl.sum(weight_MG, axis=1)
    weight_MP = (weight_MP / sum_M[:, None]).to(kind)
    weight_MG = (weight_MG / sum_M[:, None]).to(kind).to(tl.float32)
    place_PE = at_P[:, None] * v_P + at_E[None, :]
    v_PE = tl.load(v_ptr + user * v_B + head * v_H + place_PE, mask=inside_P[:, None], other=0.0)
    seen_ME = tl.dot(weight_MP, v_PE, input_precision="ieee").to(kind).to(tl.float32)
    newest_M = tl.sum(tl.where((at_G == g)[None, :], weight_MG, 0.0), axis=1)
    own_ME = newest_M[:, None] * v_ME.to(tl.float32)
    for place in range(0, g):
        weight_M = tl.sum(tl.where((at_G == place)[None, :], weight_MG, 0.0), axis=1)
        one_ME = tl.load(values_ptr + own_M1 + place * E + at_E[None, :]).to(tl.float32)
        own_ME += weight_M[:, None] * one_ME
    seen_ME = (seen_ME + own_ME.to(kind).to(tl.float32)).to(kind)
    out_M1 = (user * W + beam_M)[:, None] * (H * E) + head * E
    tl.store(seen_ptr + out_M1 + at_E[None, :], seen_ME, mask=there_M1)


@triton.jit
def _turned(x_ptr, at_E, other_E, cos_1E, sin_1E):  # type: ignore[no-untyped-def]
    """A row of numbers, turned by its place."""
    x_ME, swapped_ME = tl.load(x_ptr + at_E[None, :]), tl.load(x_ptr + other_E[None, :])
    kind = x_ME.dtype
    straight_ME = (x_ME.to(tl.float32) * cos_1E.to(tl.float32)).to(kind).to(tl.float32)
    return (straight_ME + swapped_ME.to(tl.float32) * sin_1E.to(tl.float32)).to(kind)
