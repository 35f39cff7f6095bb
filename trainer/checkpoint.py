"""Checkpoints: written beside, renamed when complete, then pointed at.

    checkpoints/
        .saving-step-00000100/   while it is written; what a crash leaves behind is never read
        step-00000100/           complete: shards and metadata of torch's distributed checkpoint,
                                 and trainer.json, which is written last
        latest                   the name of the newest complete one

Any number of ranks can read what any other number wrote.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from collectives.host import broadcast
from configs.values import at_least
from trainer.errors import CheckpointError
from trainer.rng import rng_state, set_rng_state

FORMAT = 1
STEP = re.compile(r"step-(\d{8})")


@dataclass(kw_only=True)
class CheckpointConfig:
    """The `checkpoint` node."""

    every: int = 500
    """Save every so many steps; 0: only at the end, and when stopped by a signal."""
    keep: int = 2
    """How many complete checkpoints stay."""
    at_end: bool = True
    """Save after the last step."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)


class Saver:
    """Writes and reads the checkpoints of one run folder. Every rank makes the same calls."""

    def __init__(self, config: CheckpointConfig, run_dir: Path) -> None:
        self.config, self.folder = config, run_dir / "checkpoints"

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after this step."""
        return self.config.every > 0 and step % self.config.every == 0

    def newest(self) -> Path | None:
        """The newest complete checkpoint: what `latest` names, else the highest step."""
        pointer = self.folder / "latest"
        if pointer.is_file():
            name = pointer.read_text().strip()
            if STEP.fullmatch(name) and (self.folder / name / "trainer.json").is_file():
                return self.folder / name
        complete = self._complete()
        return complete[-1] if complete else None

    def _complete(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if STEP.fullmatch(p.name)]
        return sorted(p for p in found if (p / "trainer.json").is_file())

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        device: torch.device,
    ) -> Path:
        """Save; `progress` is plain data with at least `step`. Raises `CheckpointError`."""
        final = self.folder / f"step-{progress['step']:08d}"
        temporary = self.folder / f".saving-{final.name}"
        self._on_first_rank(lambda: self._clear(temporary))
        try:
            save_tensors(_tensors(model, optimizer, device), checkpoint_id=temporary)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"cannot write {temporary}: {_cause(error)}: free some space, or set another run.dir"
            ) from error
        plain = {**progress, "device": device.type}
        self._on_first_rank(lambda: self._commit(temporary, final, plain))
        return final

    def _clear(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".saving-*"):  # by a crash; nothing else writes here now
            shutil.rmtree(left, ignore_errors=True)
        if temporary.exists():
            raise OSError(f"{temporary} cannot be removed")

    def _commit(self, temporary: Path, final: Path, progress: Mapping[str, Any]) -> None:
        """Make what all ranks wrote the newest checkpoint, and drop the oldest."""
        plain = {"format": FORMAT, "world_size": dist.get_world_size(), **progress}
        write_durably(temporary / "trainer.json", json.dumps(plain, indent=1))
        if final.exists():  # incomplete, or of an earlier try at the same steps
            aside = self.folder / f".saving-old-{final.name}"
            os.rename(final, aside)
            os.rename(temporary, final)
            shutil.rmtree(aside)
        else:
            os.rename(temporary, final)
        _sync_folder(self.folder)
        pointer = self.folder / ".latest"
        write_durably(pointer, final.name)
        os.replace(pointer, self.folder / "latest")
        _sync_folder(self.folder)
        for old in self._complete()[: -self.config.keep]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _on_first_rank(self, action: Any) -> None:
        """Run `action` on rank 0 while the others wait; its failure fails every rank."""
        problem = None
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                problem = f"cannot write under {self.folder}: {error.strerror}: set run.dir"
        if problem := broadcast(problem):
            raise CheckpointError(problem)

    def load(
        self,
        checkpoint: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> dict[str, Any]:
        """Restore everything from `checkpoint`; returns the progress. Raises `CheckpointError`."""
        progress = read_progress(checkpoint)
        same_ranks = (
            progress["world_size"] == dist.get_world_size()
            and progress.get("device") == device.type
        )
        chosen = [dict(group) for group in optimizer.param_groups]
        state = _tensors(model, optimizer, device, with_rng=same_ranks)
        try:
            load_tensors(state, checkpoint_id=checkpoint)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"cannot read {checkpoint}: {_cause(error)}: resume with the configuration that "
                "wrote it, or set trainer.resume to another checkpoint"
            ) from error
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for group, wanted in zip(optimizer.param_groups, chosen, strict=True):
            # Moments come from the checkpoint, settings from the configuration.
            group.update({k: v for k, v in wanted.items() if k != "params"})
        if same_ranks:
            set_rng_state(state["rng"][f"rank{dist.get_rank()}"], device)
        return progress


def find(resume: str, saver: Saver) -> Path | None:
    """The checkpoint that `trainer.resume` means, the same on all ranks; None: start afresh.

    Raises `CheckpointError` for a run folder that would be mixed with another run, or a folder
    that is no checkpoint.
    """
    newest = broadcast(saver.newest())
    if resume == "auto":
        return newest
    if resume == "never":
        if newest is not None:
            raise CheckpointError(
                f"{saver.folder.parent} already holds a run ({newest.name}): set "
                "trainer.resume=auto to go on with it, or another run.dir"
            )
        return None
    path = Path(resume)
    run = Saver(saver.config, path)
    path = run.newest() or path
    read_progress(path)
    return path


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The plain data of a complete checkpoint. Raises `CheckpointError`."""
    try:
        progress = json.loads((checkpoint / "trainer.json").read_text())
        if not isinstance(progress, dict) or not progress.keys() >= {
            "format",
            "world_size",
            "step",
        }:
            raise ValueError("trainer.json is not ours")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint: set trainer.resume to auto, never, or the "
            "folder of a run or of a checkpoint"
        ) from error
    if progress["format"] > FORMAT:
        raise CheckpointError(
            f"{checkpoint} was written by a newer version of springtide: install that version"
        )
    return dict(progress)


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, with_rng: bool = True
) -> dict[str, Any]:
    """Model and optimizer by parameter name, and each rank's random state under its own key."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    if with_rng:
        state["rng"] = {f"rank{dist.get_rank()}": rng_state(device)}
    return state


def write_durably(path: Path, text: str) -> None:
    """Write a file and have it on the disk before returning."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """The first line that says something, of an error that wraps those of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = sorted(failures.items())[0]
        return f"rank {rank}: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
