"""diffusers' video transformer on the meta device, its first weights, its cost, and folders of it."""

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.hf_folder import Read, write_tensors

STD = 0.02
FILE = "diffusion_pytorch_model"
"""How diffusers names files of weights."""
BACKWARD = 3
"""A training step computes three times what its forward pass does."""


def build_wan(shape: dict[str, Any]) -> nn.Module:
    """Of `models.wan.config.WanConfig.shape`, in fp32 and in training mode.

    Raises `ValueError` where diffusers is not installed.
    """
    try:
        from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    except ImportError as error:
        raise ValueError(
            f"the video transformer needs diffusers ({error}): pip install 'springtide[video]'"
        ) from error
    # it would warn of casts, which are our business: fp32 stays beside them, in the optimizer
    logging.getLogger("diffusers.models.modeling_utils").setLevel(logging.ERROR)
    with torch.device("meta"):
        model: nn.Module = WanTransformer3DModel(**shape)
    return model.train()


@torch.no_grad()
def init_weights(model: Any, module: nn.Module) -> None:
    """Initialise the direct parameters and buffers of one `module` of `model` as Wan's own code does.

    Xavier for projections, a normal distribution for what reads times and text, nothing for the last
    projection, which makes a new model say 0.
    """
    embedder = model.condition_embedder
    if isinstance(module, nn.Linear | nn.Conv3d):
        if module is model.proj_out:
            nn.init.zeros_(module.weight)
        elif any(
            module is part
            for source in (embedder.time_embedder, embedder.text_embedder)
            for part in source.modules()
        ):
            nn.init.normal_(module.weight, std=STD)
        else:
            weight = module.weight
            nn.init.xavier_uniform_(weight.flatten(1) if weight.dim() > 2 else weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()
    elif hasattr(module, "freqs_cos"):  # rotations, which are worked out again
        rope: Any = module
        fresh = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
        for name, buffer in rope.named_buffers(recurse=False):
            buffer.copy_(getattr(fresh, name))
    else:  # tables of shifts and scales
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def training_flops(shape: dict[str, Any], tokens: int, words: int, videos: int) -> float:
    """Floating-point operations of a forward and backward pass over videos of so many tokens each.

    Attention to all tokens and to all vectors of text, feed-forward, and projections of every token;
    what is done once a video is left out.
    """
    M = shape["num_attention_heads"] * shape["attention_head_dim"]
    D, F = shape["text_dim"], shape["ffn_dim"]
    patch = int(torch.tensor(shape["patch_size"]).prod())
    ends = tokens * M * patch * (shape["in_channels"] + shape["out_channels"])
    text = words * (D * M + M * M)
    per_layer = tokens * (6 * M * M + 2 * M * F) + words * 2 * M * M
    per_layer += 2 * M * tokens * (tokens + words)
    return BACKWARD * 2.0 * videos * (ends + text + shape["num_layers"] * per_layer)


def write_folder(model: Any, read: Read, out: Path, options: Namespace) -> int:
    """Write `model` (on meta) as diffusers' `from_pretrained` loads it; returns the bytes."""
    kept = model._keep_in_fp32_modules

    def form(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def stays(name: str) -> bool:
        return any(part in kept for part in name.split("."))

    size = write_tensors(model, read, out, options, FILE, form, stays)
    model.save_config(out)
    about = json.loads((out / "config.json").read_text())
    about.pop("_name_or_path", None)
    (out / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    return size
