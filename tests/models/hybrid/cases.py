"""Small hybrid models and packed documents that the tests share."""

import torch

from models.hybrid.documents import Documents
from models.hybrid.model import Hybrid, init_weights
from models.hybrid.shape import BLOCK_TOPK, FULL, SLIDING_WINDOW, Shape

MIXES = [(13, 1, 30, 7), (64,), (3, 3, 3), (21, 0, 40)]
"""Lengths of documents."""


def small_shape(**changes):
    sizes = {
        "kinds": (BLOCK_TOPK, SLIDING_WINDOW, BLOCK_TOPK, FULL), "hidden_size": 32,
        "intermediate_size": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 61,
        "window": 5, "block": 4, "top_k": 3, "num_experts": 8, "active_experts": 2,
        "expert_size": 16,
    }  # fmt: skip
    return Shape(**(sizes | changes))


def small_model(seed=0, dtype=torch.float64, **changes):
    """With weights far enough from 0 that every part has an effect; those of bf16 are rounded fp32."""
    model = Hybrid(small_shape(**changes)).to(torch.promote_types(dtype, torch.float32))
    torch.manual_seed(seed)
    for module in model.modules():
        init_weights(module, std=0.2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model.to(dtype)


def packed(lengths, vocab_size=61, seed=1, device="cpu"):
    """Tokens and documents."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=generator)
    return tokens.to(device), Documents.of(lengths, device)


def gradients(model):
    """By name; fails where there is none."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found
