"""An exported decoder: weights, semantic IDs, and the names that numbers stand for."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from models.slide.build import Decoder, build
from models.slide.config import SlideConfig
from models.slide.ids import SemanticIds
from models.slide.trie import Trie, build_trie

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""Reads whole tensors by name."""
WEIGHTS, IDS, ABOUT = "model.safetensors", "ids.safetensors", "slide.json"
FILES = (WEIGHTS, IDS, ABOUT)


@dataclass(frozen=True)
class Exported:
    """What `write_folder` wrote."""

    model: Decoder
    """In evaluation mode."""
    ids: SemanticIds
    names: Sequence[str]
    """Of the items, by number."""
    about: Mapping[str, Any]
    """What the writer said of where it comes from."""
    fingerprint: str
    """Of all that is in the folder."""

    @cached_property
    def trie(self) -> Trie:
        """Of the IDs, where the model is."""
        return build_trie(self.ids, self.model.tokens_VD.device)


def write_folder(
    out: Path, model: nn.Module, read: Read, config: SlideConfig, ids: SemanticIds,
    names: Sequence[str], about: Mapping[str, Any],
) -> None:  # fmt: skip
    """Everything that turns a history of names into a list of names."""
    save_file(read(list(model.state_dict())), out / WEIGHTS)
    arrays = {"codes_IL": ids.codes_IL, "ranks_I": ids.ranks_I}
    save_file({name: torch.from_numpy(a).contiguous() for name, a in arrays.items()}, out / IDS)
    plain = {
        "model": asdict(config),
        "sizes": list(ids.sizes),
        "items": list(names),
        "about": dict(about),
    }
    (out / ABOUT).write_text(json.dumps(plain, indent=1))


def load_folder(folder: Path | str, device: torch.device | str = "cpu") -> Exported:
    """Read it. Raises `ValueError` for a folder that is none."""
    folder = Path(folder)
    try:
        plain = json.loads((folder / ABOUT).read_text())
        arrays = {name: a.numpy() for name, a in load_file(folder / IDS).items()}
        ids = SemanticIds(arrays["codes_IL"], tuple(plain["sizes"]), arrays["ranks_I"])
        model = build(SlideConfig(**plain["model"]), ids.sizes)
        load_model(model, folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} is no exported folder: {str(error).splitlines()[0]}") from error
    if len(plain["items"]) != ids.num_items:
        raise ValueError(f"{folder} names {len(plain['items'])} items and has {ids.num_items} IDs")
    digest = hashlib.sha256()
    for name in FILES:
        digest.update((folder / name).read_bytes())
    return Exported(
        model.to(device).eval(), ids, plain["items"], plain["about"], digest.hexdigest()[:16]
    )


def numbers_of(names: Sequence[str]) -> dict[str, int]:
    """Item numbers by name."""
    return {name: number for number, name in enumerate(np.asarray(names).tolist())}
