"""First weights of a sharded model: from the architecture's rule, or from safetensors files.

Neither ever holds the whole model on a rank. Initialisation holds one module at a time, with a
random state that depends on the seed and the module's name only; loading reads just the rows that
the rank keeps. So both give the same weights on any number of ranks.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.torch_private import local_slices


def materialize(
    model: nn.Module, device: torch.device, init: Callable[[nn.Module], None], seed: int
) -> None:
    """Give a model on the meta device its storage and its initial weights.

    `init` initialises the direct parameters and buffers of the module it gets, which are whole and
    on `device` while it runs. Shared parameters are initialised by the first module that has them.
    What it does not write is NaN, for `check_written` to find.
    """
    model.to_empty(device=device)
    for buffer in model.buffers():
        _unwrite(buffer)
    done: set[int] = set()
    for name, module in model.named_modules():
        direct = dict(module.named_parameters(recurse=False))
        has_buffers = any(True for _ in module.buffers(recurse=False))
        if not has_buffers and all(id(p) in done for p in direct.values()):
            continue
        _init_module(name, module, direct, done, device, init, seed)
        done.update(id(p) for p in direct.values())


@torch.no_grad()
def _init_module(
    name: str,
    module: nn.Module,
    direct: dict[str, nn.Parameter],
    done: set[int],
    device: torch.device,
    init: Callable[[nn.Module], None],
    seed: int,
) -> None:
    """Swap whole parameters in, initialise them, and keep this rank's part of each."""
    for key, parameter in direct.items():
        whole = _unwrite(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
        module._parameters[key] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(_seed(seed, name))
        init(module)
    for key, parameter in direct.items():
        whole = module._parameters[key]  # type: ignore[assignment]
        module._parameters[key] = parameter
        if id(parameter) not in done:
            _local(parameter).copy_(whole[local_slices(parameter)])


def _unwrite(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@torch.no_grad()
def check_written(model: nn.Module) -> None:
    """Raise `ValueError` if some of a model's tensors have not got their first values."""
    named = {**_targets(model), **dict(model.named_buffers())}
    floats = {name: _local(t) for name, t in named.items() if t.is_floating_point()}
    unwritten = torch.stack([t.isnan().any() for t in floats.values()]).tolist() if floats else []
    absent = [name for name, is_nan in zip(floats, unwritten, strict=True) if is_nan]
    if absent:
        shown = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        raise ValueError(
            f"nothing gives {len(absent)} of the model's tensors a first value ({shown}), neither its "
            "own initialisation nor a folder: set model.path to one that does, and "
            "model.load_weights=true"
        )


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


@torch.no_grad()
def load_safetensors(
    model: nn.Module, folder: Path, locate: Callable[[Iterable[str]], Mapping[str, Any]]
) -> None:
    """Read this rank's part of every parameter and persistent buffer from `folder`.

    `locate` maps names of the model's state dict to where the values are, given all stored names:
    a stored name, of which only this rank's slice is read, or a function that makes the whole
    tensor from a reader of whole stored tensors. Raises `ValueError` that lists what is missing
    or has another shape.
    """
    files = _Files(folder)
    where = locate(files.names)
    loaded: set[int] = set()
    targets = _targets(model)
    for name, target in targets.items():
        if name not in where:
            continue
        source = (
            files.view(where[name]) if isinstance(where[name], str) else where[name](files.read)
        )
        shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
        if shape != tuple(target.shape):
            raise ValueError(
                f"{folder}: {name} has shape {shape}, but the model's is {tuple(target.shape)}: "
                "set the sizes under model.* to the folder's, or unset them"
            )
        local = _local(target)
        if local.numel():
            local.copy_(source[local_slices(target)])
        loaded.add(id(target))
    # A tied output layer is often stored once, under the embedding's name only.
    absent = [name for name, target in targets.items() if id(target) not in loaded]
    if absent:
        shown = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        raise ValueError(
            f"{folder} lacks {len(absent)} of the model's tensors ({shown}): set model.path to a "
            "folder of this architecture"
        )


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared parameter under each of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return {**named, **buffers}


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that differs between different `tensors`, and not between ways to shard them.

    Collective. Bits times places, summed in whole numbers that wrap around: no order of summation
    changes it.
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        part = _local(tensor).detach()
        bits = part.contiguous().view(
            torch.uint8 if part.element_size() == 1 else _WORDS[part.element_size()]
        )
        place = torch.full((), number + 1, dtype=torch.int64, device=part.device)
        for axis, (taken, size) in enumerate(zip(local_slices(tensor), tensor.shape, strict=True)):
            shape = [-1 if i == axis else 1 for i in range(tensor.ndim)]
            index = torch.arange(taken.start, taken.start + part.shape[axis], device=part.device)
            place = place * (size + 1) + index.view(shape)
        own = (bits.long() * (place * _ODD + 1)).sum()
        own = own if _is_first_copy(tensor) else torch.zeros_like(own)
        total = own if total is None else total * _ODD + own
    found = total if total is not None else torch.zeros((), dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(found)
    return int(found)


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D


def _is_first_copy(tensor: Tensor) -> bool:
    """Whether no other rank counts this one's part: it is the first of those that hold the same."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate: Any = tensor.device_mesh.get_coordinate() or []
    return not any(
        at
        for at, placement in zip(coordinate, tensor.placements, strict=True)
        if not placement.is_shard()
    )


class _Files:
    """The safetensors files of a folder, opened when first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = safetensors_index(folder)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def view(self, name: str) -> Any:
        """A tensor to take slices of; nothing else of it is read."""
        return self._file(name).get_slice(name)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        tensor = self._file(name).get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def _file(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        return self._open[file]


def safetensors_index(folder: Path) -> dict[str, str]:
    """Which file of `folder` holds each tensor. Raises `ValueError` if there is none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _read_index(index)
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as tensors:
            found.update((name, file.name) for name in tensors.keys())  # noqa: SIM118
    if not found:
        raise ValueError(
            f"{folder} holds no .safetensors file: set model.path to a folder with weights, or "
            "model.load_weights=false"
        )
    return found


def _opened(file: Path) -> Any:
    """A safetensors file. Raises `ValueError` if it is none, or cut."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): restore it, or set model.path"
        ) from error


def _read_index(index: Path) -> dict[str, str]:
    """Which file holds each tensor, as an index of transformers' says. Raises `ValueError`."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of safetensors files: restore it, or set model.path"
        ) from error
    for file in set(files.values()):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise ValueError(
                f"{index} names {file}, which is no file of its folder: restore it, or set model.path"
            )
    return files
