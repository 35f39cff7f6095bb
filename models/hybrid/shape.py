"""What a hybrid model is made of: every size and choice, as the modules read them."""

from dataclasses import dataclass

from configs.values import at_least, one_of

FULL, SLIDING_WINDOW, BLOCK_TOPK = "full", "sliding_window", "block_topk"
KINDS = (FULL, SLIDING_WINDOW, BLOCK_TOPK)
"""How a layer attends; `models.hybrid.attention` says who sees whom."""
ROUTERS = ("sigmoid", "softmax")
ALIGNED = 8
"""Grouped matrix products want rows of a multiple of 16 bytes, which are 8 numbers of bf16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every size and choice. Meanings: the fields of the same names in `HybridConfig`."""

    kinds: tuple[str, ...] = (BLOCK_TOPK, BLOCK_TOPK, BLOCK_TOPK, FULL) * 2
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 257
    max_positions: int = 131072
    window: int = 2048
    block: int = 512
    top_k: int = 4
    rotary: tuple[str, ...] = (SLIDING_WINDOW, BLOCK_TOPK)
    rope_theta: float = 10000.0
    dense_layers: int = 1
    num_experts: int = 64
    active_experts: int = 6
    expert_size: int = 512
    shared_experts: int = 1
    router: str = "sigmoid"
    route_scale: float = 1.0
    scale_embeddings: bool = True
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_positions", "window", "block", "top_k", "num_experts",
                     "active_experts", "expert_size", "shared_experts"):  # fmt: skip
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.dense_layers", self.dense_layers, 0)
        at_least("model.num_layers", len(self.kinds), 1)
        for name in ("kinds", "rotary"):
            for kind in getattr(self, name):
                one_of(f"a kind in model.{name}", kind, KINDS)
        one_of("model.router", self.router, ROUTERS)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}: set model.num_kv_heads to a divisor"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}: set model.head_dim to an even number"
            )
        if self.active_experts > self.num_experts:
            raise ValueError(
                f"model.active_experts={self.active_experts} of "
                f"model.num_experts={self.num_experts}: set model.active_experts to at most that"
            )
        for name in ("hidden_size", "expert_size"):
            if getattr(self, name) % ALIGNED:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} does not suit grouped matrix products: set "
                    f"model.{name} to a multiple of {ALIGNED}"
                )

    @property
    def num_layers(self) -> int:
        """Of all kinds."""
        return len(self.kinds)

    @property
    def moe_layers(self) -> int:
        """Layers with a mixture of experts; the others, which come first, are dense."""
        return max(self.num_layers - self.dense_layers, 0)


def pattern(num_layers: int, full_every: int, sparse: str) -> tuple[str, ...]:
    """Kinds of layers: every `full_every`th full, the others `sparse`; 4 makes 1F3S."""
    return tuple(
        FULL if number % full_every == 0 else sparse for number in range(1, num_layers + 1)
    )
