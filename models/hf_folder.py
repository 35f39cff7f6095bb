"""Writing a folder that transformers' `from_pretrained` loads: safetensors, index, configuration.

The model is on the meta device and its tensors are read a layer at a time, so that a model of any
size is written with the memory of its largest layer and one file.
"""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.stored_weights import stays_fp32, stored_form

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""Reads whole tensors of the model, by the names of its state dict."""


def add_weight_arguments(parser: ArgumentParser) -> None:
    """The options of `write_hf_folder`."""
    types = ("bfloat16", "float32", "float16")
    parser.add_argument("--dtype", choices=types, default="bfloat16", help="type of the weights")
    parser.add_argument(
        "--max-file-gib", type=float, default=5.0, help="a file holds at most this, or one layer"
    )


def write_hf_folder(model: nn.Module, read: Read, out: Path, options: Namespace) -> int:
    """Write `model` (of transformers, on meta) to the existing folder `out`; returns the bytes.

    `options` are those of `add_weight_arguments`; what is not floating point keeps its type, and so does
    what the architecture never rounds.
    """
    form, stays = partial(stored_form, model), partial(stays_fp32, model)
    size = write_tensors(model, read, out, options, "model", form, stays)
    config = model.config
    config.dtype, config.use_cache = getattr(torch, options.dtype), True  # type: ignore[union-attr]
    config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    config.save_pretrained(out)  # type: ignore[operator, union-attr]
    return size


def write_tensors(
    model: nn.Module,
    read: Read,
    out: Path,
    options: Namespace,
    stem: str,
    form: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    stays: Callable[[str], bool],
) -> int:
    """Write the tensors of `model` to files whose names begin with `stem`; returns the bytes.

    `form` turns those of a layer into what is stored, by name; those that `stays` says keep their type.
    """
    dtype, max_bytes = getattr(torch, options.dtype), options.max_file_gib * 2**30
    written: list[tuple[Path, list[str], int]] = []
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        path = out / f"part-{len(written):05d}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        written.append((path, list(waiting), _size(waiting)))
        waiting.clear()

    for names in layers(own_names(model)):
        tensors = {
            name: tensor if stays(name) else _cast(tensor, dtype)
            for name, tensor in read(names).items()
        }
        stored = {name: t.contiguous() for name, t in form(tensors).items()}
        if waiting and _size(waiting) + _size(stored) > max_bytes:
            flush()
        waiting |= stored
    flush()
    _name_files(out, stem, written)
    return sum(size for _, _, size in written)


def own_names(model: nn.Module) -> list[str]:
    """Names in the state dict, shared tensors once: under the name that comes first."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            names.append(name)
            seen.add(id(tensor))
    return names


def layers(names: Sequence[str]) -> Iterator[list[str]]:
    """`names` in groups that belong to one layer: all that is equal up to the first number."""
    for _, group in groupby(names, lambda name: re.sub(r"(\.\d+\.).*", r"\1", name)):
        yield list(group)


def _name_files(out: Path, stem: str, written: Sequence[tuple[Path, list[str], int]]) -> None:
    """Give the files the names that are looked for, and write the index of several."""
    if len(written) == 1:
        written[0][0].rename(out / f"{stem}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names, _) in enumerate(written, start=1):
        name = f"{stem}-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(out / name)
        weight_map |= dict.fromkeys(names, name)
    index: dict[str, Any] = {"metadata": {"total_size": sum(size for _, _, size in written)}}
    index |= {"weight_map": dict(sorted(weight_map.items()))}
    (out / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
