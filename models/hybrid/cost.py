"""What training a hybrid model must compute: the definition behind its MFU.

Only what the architecture asks for: experts that are visited, pairs of a query and a key that is seen,
nothing twice. A kernel that computes more (whole tiles, say) is not credited for it.

Legend: L length of a document.
"""

from collections.abc import Sequence

import numpy as np

from models.hybrid.shape import BLOCK_TOPK, FULL, SLIDING_WINDOW, Shape

BACKWARD = 3
"""A training step computes three times what its forward pass does."""


def parameters_per_row(shape: Shape) -> int:
    """Parameters that a row is multiplied with: of its experts, not of all; embeddings are looked up."""
    M, N = shape.hidden_size, shape.num_heads * shape.head_dim
    attention = M * (3 * N + 2 * shape.num_kv_heads * shape.head_dim)
    visited = shape.active_experts + shape.shared_experts
    moe = M * shape.num_experts + 3 * M * shape.expert_size * visited
    dense = 3 * M * shape.intermediate_size
    dense_layers = shape.num_layers - shape.moe_layers
    layers = shape.num_layers * attention + shape.moe_layers * moe + dense_layers * dense
    return layers + M * shape.vocab_size


def seen_pairs(shape: Shape, kind: str, lengths: Sequence[int]) -> int:
    """Pairs of a row and one that it sees, in one head of one layer."""
    L = np.asarray(lengths, np.int64)
    if kind == FULL:
        return int(_triangle(L).sum())
    if kind == SLIDING_WINDOW:
        short = np.minimum(L, shape.window)
        return int((_triangle(short) + (L - short) * shape.window).sum())
    whole, rest = np.divmod(L, shape.block)
    own = whole * _triangle(shape.block) + _triangle(rest)
    # of block n, each row sees min(n, top_k - 1) earlier blocks
    few = np.minimum(whole, shape.top_k - 1)
    earlier = shape.block * (few * (few - 1) // 2 + (whole - few) * few) + rest * few
    return int((own + shape.block * earlier).sum())


def scored_pairs(shape: Shape, lengths: Sequence[int]) -> int:
    """Pairs of a row and an earlier block that it scores, in one head of one block_topk layer."""
    L = np.asarray(lengths, np.int64)
    whole, rest = np.divmod(L, shape.block)
    return int((shape.block * (whole * (whole - 1) // 2) + rest * whole).sum())


def training_flops(shape: Shape, lengths: Sequence[int]) -> float:
    """Floating-point operations of a forward and backward pass over documents of these lengths."""
    width = shape.num_heads * shape.head_dim
    total = BACKWARD * 2.0 * parameters_per_row(shape) * sum(lengths)
    for kind in set(shape.kinds):
        layers = shape.kinds.count(kind)
        total += BACKWARD * 4.0 * width * layers * seen_pairs(shape, kind, lengths)
        if kind == BLOCK_TOPK:  # the choice has no gradient
            total += 2.0 * width * layers * scored_pairs(shape, lengths)
    return total


def _triangle(n: "np.ndarray | int") -> "np.ndarray":
    return np.asarray(n * (n + 1) // 2)
