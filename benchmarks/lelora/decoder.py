"""Llama for many runs at once, each with low-rank updates, or weights, of its own.

    P runs, B texts, T tokens, X = B T, U targets of a text, D hidden, H heads, G heads of keys,
    d a head's size, V words, L layers, K rows of an update

As in `benchmarks.lelora.encoder`, what all runs share has no axis for them, shapes are fixed, and
nothing waits for the device. But updates are products of their own: weights of bfloat16 have eight
bits, and most of a small update would be lost below them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.lelora.stacked import Factors

SQUARE = ("self_attn.q_proj", "self_attn.o_proj")
NARROW = ("self_attn.k_proj", "self_attn.v_proj")
UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
GROUPS = (SQUARE, NARROW, UP, DOWN)
"""A layer's matrices, those of one shape together."""
Look = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Decoder:
    """A pre-trained language model, in fp32. Its output layer is its table of words."""

    matrices: list[Tensor]
    """Of each of `GROUPS`: (L x matrices of the group, M, N), layer by layer."""
    rest: dict[str, Tensor]
    """Everything else, by transformers' names."""
    layers: int
    heads: int
    narrow_heads: int
    """Of keys and values."""
    theta: float
    """Base of the positions' frequencies."""
    epsilon: float
    """Of the norms."""
    words = "model.embed_tokens.weight"
    """Of `rest`, the table that has a row for each token. It stays in fp32, and so are logits."""

    @property
    def names(self) -> list[list[str]]:
        """Of the adapted layers in transformers' model, group by group, in the order of `matrices`."""
        return [
            [f"model.layers.{layer}.{name}" for layer in range(self.layers) for name in group]
            for group in GROUPS
        ]

    @staticmethod
    def of(
        named: Mapping[str, Tensor], heads: int, narrow_heads: int, theta: float, epsilon: float
    ) -> "Decoder":
        """From tensors by transformers' names."""
        layers = 1 + max(int(n.split(".")[2]) for n in named if n.startswith("model.layers."))
        empty = Decoder([], {}, layers, heads, narrow_heads, theta, epsilon)
        adapted = {f"{n}.weight" for group in empty.names for n in group}
        matrices = [torch.stack([named[f"{n}.weight"] for n in group]) for group in empty.names]
        rest = {n: t for n, t in named.items() if n not in adapted and n != "lm_head.weight"}
        return Decoder(matrices, rest, layers, heads, narrow_heads, theta, epsilon)


class Layers:
    """The adapted layers of all runs in a step: `whole` weights, or factors beside shared ones."""

    def __init__(
        self, base: Decoder, shared: Sequence[Tensor], factors: Sequence[Factors],
        whole: Sequence[Tensor] = (), look: Look = lambda name, x: None,
    ) -> None:  # fmt: skip
        self.look = look
        self.whole: dict[str, Tensor] = {}
        self.shared: dict[str, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}
        for n, names in enumerate(base.names):
            if whole:
                self.whole |= zip(names, whole[n].unbind(1), strict=True)
                continue
            of = factors[n]
            parts = zip(shared[n].unbind(0), of.left_PLMK.unbind(1), of.right_PLKN.unbind(1),
                        [None] * len(names) if of.stretch_PLM is None else of.stretch_PLM.unbind(1),
                        strict=True)  # fmt: skip
            self.shared |= zip(names, parts, strict=True)

    def __call__(self, name: str, x_PXN: Tensor) -> Tensor:
        """What a layer gives, (P, X, M)."""
        self.look(name, x_PXN)
        if self.whole:
            return torch.bmm(x_PXN, self.whole[name].transpose(1, 2))
        w_MN, left_PMK, right_PKN, stretch_PM = self.shared[name]
        h_PXK = torch.bmm(x_PXN, right_PKN.transpose(1, 2))
        y_PXM = torch.baddbmm(x_PXN @ w_MN.T, h_PXK, left_PMK.transpose(1, 2))
        if stretch_PM is None:
            return y_PXM
        return torch.addcmul(y_PXM, y_PXM, stretch_PM[:, None])


def norm(x_PXD: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """By the root of the mean square; weights are shared (D) or of each run (P, D)."""
    if weight.ndim == 1:
        return F.rms_norm(x_PXD, weight.shape, weight, epsilon)
    return F.rms_norm(x_PXD, weight.shape[-1:], eps=epsilon) * weight[:, None]


def turned(x_RTHd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """By each token's place: the first half of a head's numbers with the second one."""
    first, second = x_RTHd.chunk(2, -1)
    return torch.cat([first * cos_Td - second * sin_Td, second * cos_Td + first * sin_Td], -1)


def angles(base: Decoder, tokens: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `turned`, (T, 1, d / 2)."""
    powers = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    places = torch.arange(tokens, device=like.device, dtype=torch.float32)
    angle = (places[:, None] / base.theta**powers)[:, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def hidden(base: Decoder, rest: Mapping[str, Tensor], layers: Layers, ids_PBT: Tensor) -> Tensor:
    """The last states of all tokens, (P, X, D). Padding comes last, so nobody sees it."""
    P, B, T = ids_PBT.shape
    H, G = base.heads, base.narrow_heads
    words = rest[base.words]
    if words.ndim == 3:
        own = ids_PBT + torch.arange(P, device=ids_PBT.device)[:, None, None] * words.shape[1]
        x = words.flatten(0, 1).index_select(0, own.reshape(-1))
    else:
        x = words.index_select(0, ids_PBT.reshape(-1))
    x = x.to(rest["model.norm.weight"].dtype).view(P, B * T, -1)
    D = x.shape[-1]
    d = D // H
    cos, sin = angles(base, T, d, x)
    for layer in range(base.layers):
        prefix = f"model.layers.{layer}"
        y = norm(x, rest[f"{prefix}.input_layernorm.weight"], base.epsilon)
        q, k, v = (
            layers(f"{prefix}.self_attn.{name}_proj", y).view(P * B, T, heads, d)
            for name, heads in (("q", H), ("k", G), ("v", G))
        )
        q, k = turned(q, cos, sin).transpose(1, 2), turned(k, cos, sin).transpose(1, 2)
        k, v = (_for_all(part, H // G) for part in (k, v.transpose(1, 2)))
        seen_RHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = seen_RHTd.transpose(1, 2).reshape(P, B * T, D)
        x = x + layers(f"{prefix}.self_attn.o_proj", y)
        y = norm(x, rest[f"{prefix}.post_attention_layernorm.weight"], base.epsilon)
        gate, up = (layers(f"{prefix}.mlp.{name}_proj", y) for name in ("gate", "up"))
        x = x + layers(f"{prefix}.mlp.down_proj", F.silu(gate) * up)
    return norm(x, rest["model.norm.weight"], base.epsilon)


def _for_all(x_RGTd: Tensor, times: int) -> Tensor:
    """Each head of keys or values for `times` heads of queries."""
    R, G, T, d = x_RGTd.shape
    return x_RGTd[:, :, None].expand(R, G, times, T, d).reshape(R, G * times, T, d)


def logits(
    base: Decoder, rest: Mapping[str, Tensor], layers: Layers, ids_PBT: Tensor, at_PBU: Tensor
) -> Tensor:
    """What comes after the tokens at `at_PBU`, (P, B U, V) in fp32."""
    P, B, T = ids_PBT.shape
    x_PXD = hidden(base, rest, layers, ids_PBT)
    first_PB1 = T * torch.arange(P * B, device=ids_PBT.device).view(P, B, 1)
    wanted = x_PXD.flatten(0, 1).index_select(0, (first_PB1 + at_PBU).reshape(-1))
    wanted_PXD = wanted.view(P, -1, x_PXD.shape[-1]).float()
    return wanted_PXD @ rest[base.words].transpose(-2, -1)
