"""The `model` node of task `wan`: what is given wins over the folder, which wins over Wan2.2-A14B."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.values import at_least
from models.causal_lm import local_folder

CLASS = "WanTransformer3DModel"
A14B: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip
"""Each of the two experts of Wan2.2-T2V-A14B, as its config.json says."""
NAMES = {
    "num_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "intermediate_size": "ffn_dim",
    "text_size": "text_dim",
    "time_size": "freq_dim",
    "max_positions": "rope_max_seq_len",
}
"""Our names, and diffusers' for the same."""
EXPERTS = {"high_noise": "transformer", "low_noise": "transformer_2"}
"""Folders of the experts in one of the pipeline."""
BOUNDARY = 0.875
"""The time that divides the experts of Wan2.2-T2V-A14B (`boundary` in its published configuration)."""


@dataclass(kw_only=True)
class WanConfig:
    """Sizes of a video transformer; empty ones are left to the folder, or are Wan2.2-A14B's."""

    path: str | None = None
    """Local folder (or hub name, where there is a network) as diffusers writes it: of a pipeline such as
    Wan2.2-T2V-A14B-Diffusers, of which `task.expert` says which transformer, or of a transformer."""
    load_weights: bool = False
    """Start from the safetensors in `path` instead of from random weights."""
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    """A multiple of 2, and at least 6: positions in time, height and width share it."""
    intermediate_size: int | None = None
    channels: int | None = None
    """Of latents."""
    text_size: int | None = None
    """Of the vectors that the text encoder gives."""
    time_size: int | None = None
    """Sines and cosines of a time."""
    max_positions: int | None = None
    """Patches of a video along an axis."""

    def __post_init__(self) -> None:
        for name in (*NAMES, "channels"):
            if getattr(self, name) is not None:
                at_least(f"model.{name}", getattr(self, name), 1)
        if self.head_dim is not None and (self.head_dim < 6 or self.head_dim % 2):
            raise ValueError(f"model.head_dim={self.head_dim}: set model.head_dim to 6, 8, 10 ...")
        if self.load_weights and self.path is None:
            raise ValueError("model.load_weights=true needs a folder: set model.path")

    def shape(self, expert: str) -> dict[str, Any]:
        """What diffusers' class is built with. Raises `ValueError` for a folder of something else."""
        given = {
            theirs: getattr(self, ours)
            for ours, theirs in NAMES.items()
            if getattr(self, ours) is not None
        }
        if self.channels is not None:
            given |= {"in_channels": self.channels, "out_channels": self.channels}
        folder = {} if self.path is None else read_shape(transformer_folder(self.path, expert))
        return {**A14B, **folder, **given}


def transformer_folder(path: str, expert: str) -> Path:
    """Where the transformer of `expert` is: `path` itself, or a folder in it."""
    folder = local_folder(path)
    if (folder / "model_index.json").is_file():
        folder = folder / EXPERTS.get(expert, "transformer")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: set model.path, or task.expert")
    return folder


def read_shape(folder: Path) -> dict[str, Any]:
    """What a transformer's config.json says of `A14B`'s fields, and of no others."""
    about: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if about.get("_class_name") != CLASS:
        raise ValueError(
            f"{folder} is of a {about.get('_class_name')}, not a {CLASS}: set model.path"
        )
    for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        if about.get(name) is not None:
            raise ValueError(f"{folder} has {name}, for images; text to video only: set model.path")
    if about.get("in_channels", 16) != about.get("out_channels", 16):
        raise ValueError(
            f"{folder} reads {about['in_channels']} channels and gives {about['out_channels']}, so more "
            "than noisy latents go in; text to video only: set model.path"
        )
    kept = {name: about[name] for name in A14B if name in about}
    return kept | ({"patch_size": tuple(kept["patch_size"])} if "patch_size" in kept else {})


def boundary_of(path: str | None) -> float:
    """The time between the experts that the folder of a pipeline names, or `BOUNDARY`."""
    index = None if path is None else local_folder(path) / "model_index.json"
    if index is None or not index.is_file():
        return BOUNDARY
    found = json.loads(index.read_text()).get("boundary_ratio")
    return BOUNDARY if found is None else float(found)
