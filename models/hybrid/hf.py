"""Hybrid models as folders: those that transformers calls Afmoe, and our own kinds of the same.

The model's names are those of transformers' class, so its own rules say how checkpoints keep the
tensors (experts one by one, say): `twin` is that class on the meta device, for `models.stored_weights`.
A model that transformers cannot run, since layers choose blocks or the router is another, has the same
tensors and a config.json of a type that transformers does not know.
"""

import json
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.causal_lm import local_folder
from models.hf_folder import Read, write_hf_folder
from models.hybrid.shape import BLOCK_TOPK, FULL, KINDS, SLIDING_WINDOW, Shape

OWN_TYPE = "springtide_hybrid"
NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "window": "sliding_window",
    "dense_layers": "num_dense_layers",
    "num_experts": "num_experts",
    "active_experts": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_experts": "num_shared_experts",
    "route_scale": "route_scale",
    "scale_embeddings": "mup_enabled",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""Our names, and Afmoe's for the same."""
LAYER_TYPES = {FULL: "full_attention", SLIDING_WINDOW: "sliding_attention"}
SERVED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "score_func": ("sigmoid",),
    "route_norm": (True,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "num_expert_groups": (1, None),
    "num_limited_groups": (1, None),
}
"""Fields of Afmoe configurations that change what is computed, and the values that are built here."""


def read_folder(path: str) -> dict[str, Any]:
    """The fields of `Shape` that a folder's config.json describes.

    Raises `ValueError` for another architecture, and for variants that are not built here.
    """
    file = local_folder(path) / "config.json"
    try:
        about = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path} holds no config.json: set model.path") from error
    if about.get("model_type") == OWN_TYPE:
        known = {name: about[name] for name in (f.name for f in fields(Shape)) if name in about}
        return known | {name: tuple(known[name]) for name in ("kinds", "rotary")}
    if about.get("model_type") != "afmoe":
        raise ValueError(
            f"model.path={path} is a model of type {about.get('model_type')}, not afmoe: set "
            "model.path to one, or task=pretrain model=folder for other types"
        )
    from transformers import AfmoeConfig

    return from_afmoe(AfmoeConfig.from_dict(about), path)


def from_afmoe(config: Any, path: str) -> dict[str, Any]:
    """The same of transformers' configuration; `path` is what error messages name."""
    for name, served in SERVED.items():
        value = getattr(config, name, served[0])
        if value not in served:
            raise ValueError(
                f"model.path={path} has {name}={value}, but only {served[0]} is built here: set "
                "model.path to another"
            )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"model.path={path} has rotary positions of type {rope['rope_type']}, but only default is "
            "built here: set model.path to another"
        )
    ours = {theirs: kind for kind, theirs in LAYER_TYPES.items()}
    for kind in config.layer_types:
        if kind not in ours:
            raise ValueError(
                f"model.path={path} has layers of type {kind}, but only {' and '.join(ours)} are "
                "built here: set model.path to another"
            )
    return {
        **{name: getattr(config, theirs) for name, theirs in NAMES.items()},
        "kinds": tuple(ours[kind] for kind in config.layer_types),
        "rope_theta": rope["rope_theta"],
        "rotary": tuple(kind for kind in KINDS if kind != FULL),
        "router": "sigmoid",
    }


def is_afmoe(shape: Shape) -> bool:
    """Whether transformers' class computes the same."""
    turned = {kind for kind in shape.kinds if kind in shape.rotary}
    return (
        shape.router == "sigmoid"
        and BLOCK_TOPK not in shape.kinds
        and turned == set(shape.kinds) - {FULL}
    )


def to_afmoe(shape: Shape) -> Any:
    """transformers' configuration with the same tensors, and the same sense where `is_afmoe`."""
    from transformers import AfmoeConfig

    sizes = {theirs: getattr(shape, name) for name, theirs in NAMES.items()}
    types = [LAYER_TYPES[FULL if kind == FULL else SLIDING_WINDOW] for kind in shape.kinds]
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return AfmoeConfig(
        **sizes, num_hidden_layers=shape.num_layers, layer_types=types, rope_parameters=rope
    )


def twin(shape: Shape) -> nn.Module:
    """transformers' model with the same tensors, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(to_afmoe(shape), dtype=torch.float32)
    return model


def write_folder(shape: Shape, read: Read, out: Path, options: Namespace) -> int:
    """Write a model to the existing folder `out`; returns the bytes. See `models.hf_folder`."""
    size = write_hf_folder(twin(shape), read, out, options)
    if not is_afmoe(shape):
        about = {"model_type": OWN_TYPE, "dtype": options.dtype, **asdict(shape)}
        (out / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    return size
