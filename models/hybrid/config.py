"""The `model` node of task `hybrid`: what is given wins over the folder, which wins over `Shape`."""

from dataclasses import dataclass, fields, replace
from typing import Any

from configs.values import at_least, one_of
from models.hybrid.shape import BLOCK_TOPK, KINDS, Shape, pattern


@dataclass(kw_only=True)
class HybridConfig:
    """Sizes and choices of a hybrid model; empty ones are left to the folder, or to defaults."""

    path: str | None = None
    """Local folder (or hub name, where there is a network) whose config.json describes an Afmoe
    model, such as Arcee's Trinity, or a hybrid model that was exported here."""
    load_weights: bool = False
    """Start from the safetensors in `path` instead of from random weights."""
    num_layers: int | None = None
    full_every: int | None = None
    """Every so many layers attend fully, the others as `sparse` says; default 4, which is 1F3S."""
    sparse: str | None = None
    """How the layers between attend: block_topk (default) or sliding_window."""
    kinds: list[str] | None = None
    """Instead of these: how each layer attends, one by one: full, sliding_window or block_topk."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding; empty: what the tokenizer needs."""
    max_positions: int | None = None
    window: int | None = None
    """Tokens that a sliding-window layer sees, the own one included."""
    block: int | None = None
    """Tokens of a block of a block_topk layer."""
    top_k: int | None = None
    """Blocks that a token sees in a block_topk layer, its own included; which others, each query head
    decides by their mean keys (MoBA)."""
    rotary: list[str] | None = None
    """Kinds of layers with rotary positions; default: all but full, which then have none."""
    rope_theta: float | None = None
    dense_layers: int | None = None
    """So many layers at the beginning have one feed-forward instead of experts."""
    num_experts: int | None = None
    """Experts of each other layer, besides the shared one."""
    active_experts: int | None = None
    """Experts that a token visits."""
    expert_size: int | None = None
    """Inner size of an expert."""
    shared_experts: int | None = None
    """Inner size of the expert that every token visits, in multiples of `expert_size`."""
    router: str | None = None
    """How experts are scored: sigmoid (default) or softmax."""
    route_scale: float | None = None
    """What the normalized weights of a token's experts are multiplied by."""
    scale_embeddings: bool | None = None
    """Multiply embeddings by the root of their size (muP)."""
    tie_embeddings: bool | None = None
    norm_eps: float | None = None
    """Added to mean squares before their root is taken."""
    init_std: float | None = None
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "full_every"):
            if getattr(self, name) is not None:
                at_least(f"model.{name}", getattr(self, name), 1)
        if self.sparse is not None:
            one_of("model.sparse", self.sparse, [kind for kind in KINDS if kind != "full"])
        if self.kinds is not None and (self.full_every or self.sparse or self.num_layers):
            raise ValueError(
                "model.kinds says how each layer attends: set model.num_layers, model.full_every and "
                "model.sparse to null, or model.kinds"
            )
        if self.load_weights and self.path is None:
            raise ValueError("model.load_weights=true needs a folder: set model.path")
        replace(Shape(), **self.given())  # its checks, of what does not depend on a folder

    def given(self) -> dict[str, Any]:
        """The fields of `Shape` that are not empty; of the kinds only if they are given one by one."""
        values = {f.name: getattr(self, f.name) for f in fields(Shape)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }

    def shape(self, folder: dict[str, Any], vocab_size: int) -> Shape:
        """With all that was left empty; `folder` are fields of `Shape`, `vocab_size` is the tokenizer's.

        Raises `ValueError` for what cannot be.
        """
        kinds: tuple[str, ...] = folder.get("kinds", Shape.kinds)
        if self.full_every or self.sparse or "kinds" not in folder:
            number = self.num_layers or len(kinds)
            kinds = pattern(number, self.full_every or 4, self.sparse or BLOCK_TOPK)
        elif self.num_layers is not None and self.num_layers > len(kinds):
            raise ValueError(
                f"model.num_layers={self.num_layers}, but {self.path} says how {len(kinds)} layers "
                "attend: set model.full_every, too, or model.num_layers to at most that"
            )
        else:
            kinds = kinds[: self.num_layers]
        return Shape(**({"vocab_size": vocab_size, **folder, "kinds": kinds} | self.given()))
