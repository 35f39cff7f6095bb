"""From a checkpoint back to a run: which one, is it sound, does it fit, and then the tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from collectives.host import broadcast, gather_objects
from trainer.checkpoint import manifest
from trainer.checkpoint.folder import Checkpoints, instead_of, read_progress
from trainer.checkpoint.reader import Reader, read_metadata
from trainer.checkpoint.state import put_back, tensors_of
from trainer.errors import CheckpointError


def find(resume: str, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint that `trainer.resume` means, the same on all ranks; None: start afresh.

    Raises `CheckpointError` for a run folder that would be mixed with another run, for a folder
    that is no checkpoint, and for one that lacks a file or a part of one.
    """
    newest = broadcast(checkpoints.newest())
    if resume == "never":
        if newest is not None:
            raise CheckpointError(
                f"{checkpoints.path.parent} already holds a run ({newest.name}): set "
                "trainer.resume=auto to go on with it, or another run.dir"
            )
        return None
    if resume == "auto":
        if newest is not None:
            read_progress(newest)
        return newest
    path = Path(resume)
    path = Checkpoints(path / "checkpoints").newest() or path
    read_progress(path)
    return path


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    steering: dict[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Restore everything from `checkpoint`; returns the progress. Raises `CheckpointError`.

    Every file is checked against the manifest first, by one rank each. `steering` is filled.
    """
    progress = read_progress(checkpoint)
    _check_content(checkpoint)
    same_ranks = (
        progress["world_size"] == dist.get_world_size() and progress["device"] == device.type
    )
    state = tensors_of(model, optimizer, device, same_ranks, steering)
    try:
        metadata = read_metadata(checkpoint)
        check_same_model(checkpoint, metadata, state["model"])
        _check_same_steering(checkpoint, metadata, steering or {})
        load_tensors(state, storage_reader=Reader(checkpoint))
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read: {' '.join(str(error).split())[:300]}: "
            f"{instead_of(checkpoint)}"
        ) from error
    put_back(state, model, optimizer, device)
    return progress


def _check_content(checkpoint: Path) -> None:
    """Raise `CheckpointError` on every rank if any rank finds damage in its share of the files."""
    files = manifest.read_manifest(checkpoint)
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    found = gather_objects(manifest.damaged(checkpoint, files, mine))
    if problem := next((text for text in found if text), None):
        raise CheckpointError(f"{checkpoint}: {problem}: {instead_of(checkpoint)}")


def _check_same_steering(
    checkpoint: Path, metadata: Metadata, steering: Mapping[str, torch.Tensor]
) -> None:
    """Raise `CheckpointError` if the task kept other things there than it does here."""
    kept = {
        name.removeprefix("steering."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("steering.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in steering.items()}
    if differing := sorted(n for n in {*kept, *wanted} if kept.get(n) != wanted.get(n)):
        raise CheckpointError(
            f"{checkpoint} keeps other things between steps: {differing[0]} is "
            f"{_shape(kept.get(differing[0]))} there and {_shape(wanted.get(differing[0]))} here: set "
            "the task's keys as in its config.yaml"
        )


def check_same_model(
    checkpoint: Path, metadata: Metadata, model_state: Mapping[str, torch.Tensor]
) -> None:
    """Raise `CheckpointError` if the checkpoint is of a model with other tensors."""
    stored = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    if stored == wanted:
        return
    differing = [name for name in wanted if wanted[name] != stored.get(name)]
    differing += [name for name in stored if name not in wanted]
    name = differing[0]
    raise CheckpointError(
        f"{checkpoint} is of another model: {len(differing)} tensors differ, such as {name}, "
        f"{_shape(stored.get(name))} there and {_shape(wanted.get(name))} here: set model.* as in "
        "its config.yaml, or another run.dir or trainer.resume"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " x ".join(map(str, shape)) or "a number"
