"""BERT for many runs at once, each with matrices of its own: as transformers has it, without dropout.

    P runs, B texts, T tokens, X = B T, D hidden, H heads, V words, L layers

What is the same for all runs has no axis for them, and what each has of its own has it first. All
shapes are fixed and nothing waits for the device, so a step can be recorded in a CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SQUARE = ("attention.self.query", "attention.self.key", "attention.self.value",
          "attention.output.dense")  # fmt: skip
UP, DOWN = "intermediate.dense", "output.dense"
GROUPS = (SQUARE, (UP,), (DOWN,))
"""A layer's matrices, those of one shape together."""
EPSILON = 1e-12


@dataclass(frozen=True)
class Encoder:
    """A pre-trained encoder, in fp32."""

    matrices: list[Tensor]
    """Of each of `GROUPS`: (L x matrices of the group, M, N), layer by layer."""
    rest: dict[str, Tensor]
    """Everything else, by transformers' names."""
    layers: int
    heads: int
    words = "embeddings.word_embeddings.weight"
    """Of `rest`, the table that has a row for each token."""

    @property
    def names(self) -> list[list[str]]:
        """Of the layers in a classifier of transformers, group by group."""
        return [[f"bert.{n}" for n in group] for group in names_of(self.layers)]

    @staticmethod
    def of(named: Mapping[str, Tensor], heads: int) -> "Encoder":
        """From tensors by transformers' names."""
        layers = 1 + max(int(n.split(".")[2]) for n in named if n.startswith("encoder.layer."))
        names = names_of(layers)
        matrices = [torch.stack([named[f"{n}.weight"] for n in group]) for group in names]
        adapted = {f"{n}.weight" for group in names for n in group}
        rest = {n: t for n, t in named.items() if n not in adapted and not n.startswith("pooler.")}
        return Encoder(matrices, rest, layers, heads)


def names_of(layers: int) -> list[list[str]]:
    """Names of the adapted layers, group by group, in the order of `Encoder.matrices`."""
    return [
        [f"encoder.layer.{layer}.{name}" for layer in range(layers) for name in group]
        for group in GROUPS
    ]


def linear(x_PXN: Tensor, w_PMN: Tensor, bias: Tensor) -> Tensor:
    """A product for each run; the bias is shared (M) or of each run (P, M)."""
    bias_P1M = bias[:, None] if bias.ndim == 2 else bias
    return torch.baddbmm(bias_P1M, x_PXN, w_PMN.transpose(1, 2))


def norm(x_PXD: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm; weights are shared (D) or of each run (P, D)."""
    if weight.ndim == 1:
        return F.layer_norm(x_PXD, weight.shape, weight, bias, EPSILON)
    plain = F.layer_norm(x_PXD, weight.shape[-1:], eps=EPSILON)
    return torch.addcmul(bias[:, None], plain, weight[:, None])


def embedded(rest: Mapping[str, Tensor], ids_PBT: Tensor) -> Tensor:
    """Words, positions and the first type, summed and normalised: (P, X, D)."""
    P, B, T = ids_PBT.shape
    words = rest["embeddings.word_embeddings.weight"]
    if words.ndim == 3:
        own = ids_PBT + torch.arange(P, device=ids_PBT.device)[:, None, None] * words.shape[1]
        x = words.flatten(0, 1).index_select(0, own.reshape(-1))
    else:
        x = words.index_select(0, ids_PBT.reshape(-1))
    x = x.to(rest["embeddings.LayerNorm.weight"].dtype)  # its gradients are summed in fp32
    x = x.view(P, B, T, -1) + _of_each(rest["embeddings.position_embeddings.weight"], T)
    x = x + _of_each(rest["embeddings.token_type_embeddings.weight"], 1)
    prefix = "embeddings.LayerNorm"
    return norm(x.view(P, B * T, -1), rest[f"{prefix}.weight"], rest[f"{prefix}.bias"])


def _of_each(table: Tensor, rows: int) -> Tensor:
    """The first rows of a table, to be added to (P, B, T, D)."""
    return table[:, None, :rows] if table.ndim == 3 else table[:rows]


def encode(
    base: Encoder, rest: Mapping[str, Tensor], matrices: Sequence[Tensor], ids_PBT: Tensor,
    lengths_PB: Tensor, look: Callable[[str, Tensor], None] = lambda name, x: None,
) -> Tensor:  # fmt: skip
    """What a classifier gets, the mean of a text's tokens, (P, B, D) in fp32.

    `matrices` are (P, ...) of each of `Encoder.matrices`. `look` is shown the inputs (P, X, N) of each
    matrix, by its name.
    """
    P, B, T = ids_PBT.shape
    square, up, down = matrices
    D, H, L = square.shape[-1], base.heads, base.layers
    in_out = square.reshape(P, L, 4 * D, D).split([3 * D, D], 2)
    three, outs = (part.unbind(1) for part in in_out)
    ups, downs = up.unbind(1), down.unbind(1)
    seen = torch.arange(T, device=ids_PBT.device) < lengths_PB.reshape(-1, 1)
    x = embedded(rest, ids_PBT)
    mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, float("-inf"))
    mask = mask.view(P * B, 1, 1, T).expand(P * B, H, T, T)
    for layer in range(L):
        prefix = f"encoder.layer.{layer}"

        def of(name: str, prefix: str = prefix) -> Tensor:
            return rest[f"{prefix}.{name}"]

        for name in SQUARE[:3]:
            look(f"{prefix}.{name}", x)
        bias = torch.cat([of(f"{name}.bias") for name in SQUARE[:3]], -1)
        qkv = linear(x, three[layer], bias).view(P * B, T, 3, H, D // H)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            seen_BHTd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = seen_BHTd.transpose(1, 2).reshape(P, B * T, D)
        look(f"{prefix}.{SQUARE[3]}", y)
        y = linear(y, outs[layer], of(f"{SQUARE[3]}.bias"))
        x = norm(
            x + y, of("attention.output.LayerNorm.weight"), of("attention.output.LayerNorm.bias")
        )
        look(f"{prefix}.{UP}", x)
        y = F.gelu(linear(x, ups[layer], of(f"{UP}.bias")))
        look(f"{prefix}.{DOWN}", y)
        y = linear(y, downs[layer], of(f"{DOWN}.bias"))
        x = norm(x + y, of("output.LayerNorm.weight"), of("output.LayerNorm.bias"))
    shown = seen.view(P, B, T, 1)
    whole = (x.view(P, B, T, D).float() * shown).sum(2)  # of 16 bits, a sum would lose some
    return whole / shown.sum(2)
