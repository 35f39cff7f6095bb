"""Activation checkpointing and compilation of a block, by replacing its `forward`.

Replacing `forward` keeps the module and its parameter names, and leaves FSDP2's hooks, which sit
around `forward`, outside both: a layer is gathered once, then compiled code and recomputation run.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._flash_attention_forward.default,
}
"""Results worth their memory: computing them again costs most of a forward pass."""


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = op in KEPT or str(op).startswith("torch_attn")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(block: nn.Module, kind: str) -> None:
    """Checkpoint the activations of `block`: `none`, `block` or `selective`."""
    if kind == "none":
        return
    extra: dict[str, Any] = {}
    if kind == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    forward = block.forward
    block.forward = partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=True, **extra
    )


def compile_block(block: nn.Module) -> None:
    """Compile the forward (and so the backward) pass of `block`."""
    block.forward = torch.compile(block.forward)
