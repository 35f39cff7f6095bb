"""The folder of a run's checkpoints: which are complete, which is the newest, which may go."""

import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import manifest
from trainer.checkpoint.durable import replace_durably, sync_folder
from trainer.errors import CheckpointError

STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoints:
    """All checkpoints of one run."""

    path: Path

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of a step is or will be."""
        return self.path / f"step-{step:08d}"

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete."""
        return self.of_step(step) in self.complete()

    def being_written(self, step: int) -> Path:
        """Where it is until it is complete."""
        return self.path / f".saving-{self.of_step(step).name}"

    def complete(self) -> list[Path]:
        """The complete ones, by step."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if STEP.fullmatch(p.name) and not p.is_symlink()]
        return sorted((p for p in found if (p / manifest.NAME).is_file()), key=_step)

    def newest(self) -> Path | None:
        """What `latest` names, if that is complete, else the one with the highest step."""
        complete = self.complete()
        pointer = self.path / "latest"
        named = self.path / pointer.read_text().strip() if pointer.is_file() else None
        return named if named in complete else next(reversed(complete), None)

    def best(self) -> Path | None:
        """What the newest one knows as the best of the run, if that is complete.

        Raises `CheckpointError` if the newest cannot be read.
        """
        newest = self.newest()
        entry = read_progress(newest).get("best") if newest is not None else None
        return self.of_step(entry["step"]) if entry and self.has(entry["step"]) else None

    def before(self, checkpoint: Path) -> Path | None:
        """The newest one before `checkpoint` that has all its files."""
        for path in reversed(self.complete()):
            if _step(path) < _step(checkpoint) and _whole(path):
                return path
        return None

    def put_aside(self, checkpoint: Path, why: str) -> Path:
        """Have it be no checkpoint of the run any more, under a new name; nothing removes it."""
        name, number = f"{why}-{checkpoint.name}", 1
        while (aside := self.path / name).exists():
            number += 1
            name = f"{why}-{checkpoint.name}-{number}"
        os.rename(checkpoint, aside)
        return aside

    def undo_after(self, step: int) -> list[Path]:
        """Put aside what is of later steps: the run has gone back to `step`."""
        later = [checkpoint for checkpoint in self.complete() if _step(checkpoint) > step]
        return [self.put_aside(checkpoint, "undone") for checkpoint in later]

    def make_room(self, size: int) -> None:
        """Remove what crashes left, and raise `CheckpointError` if `size` bytes do not fit.

        Nothing else writes here now: a run has its folder for itself.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".saving-*"):
            shutil.rmtree(left)
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise CheckpointError(
                f"a checkpoint needs {_gib(size)}, but {self.path} has {_gib(free)} left: free some "
                "space, set checkpoint.keep lower, or go on in another run.dir"
            )

    def commit(self, step: int) -> Path:
        """Give what was written for `step` its name, then point to it."""
        final, temporary = self.of_step(step), self.being_written(step)
        sync_folder(temporary)
        if final.exists():  # incomplete, or of an earlier try at the same steps
            aside = self.path / f".saving-old-{final.name}"
            os.rename(final, aside)
            os.rename(temporary, final)
            shutil.rmtree(aside)
        else:
            os.rename(temporary, final)
        sync_folder(self.path)
        replace_durably(self.path / "latest", final.name)
        return final

    def drop_old(self, keep: int, keep_every: int | None, spared: Collection[Path]) -> None:
        """Remove all but the `keep` newest, the `spared` and those of steps that `keep_every` divides.

        What cannot be removed stays: it harms nothing but space, which `make_room` looks at.
        """
        for old in self.complete()[:-keep]:
            for_ever = keep_every is not None and _step(old) % keep_every == 0
            if old not in spared and not for_ever:
                (old / manifest.NAME).unlink(missing_ok=True)  # half removed is not complete
                shutil.rmtree(old, ignore_errors=True)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The plain data of a complete checkpoint, all of whose files are there and none is cut.

    Raises `CheckpointError` that says what is wrong and what to do.
    """
    try:
        files = manifest.read_manifest(checkpoint)
        problem = manifest.missing_or_cut(checkpoint, files)
        problem = problem or manifest.damaged(checkpoint, files, ["trainer.json"])
        if problem:
            raise ValueError(problem)
        return dict(json.loads((checkpoint / "trainer.json").read_text()))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint (no {Path(error.filename).name}): set "
            "trainer.resume to auto, never, or the folder of a run or of a checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be used: {error}: {instead_of(checkpoint)}"
        ) from error


def instead_of(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint: the one before it, if there is one."""
    before = Checkpoints(checkpoint.parent).before(checkpoint) if _is_step(checkpoint) else None
    if before is None:
        return "there is none before it: restore the file, or start again in another run.dir"
    return f"set trainer.resume={before}, the one before it, or restore the file"


def _whole(checkpoint: Path) -> bool:
    try:
        return manifest.missing_or_cut(checkpoint, manifest.read_manifest(checkpoint)) is None
    except (OSError, ValueError):
        return False


def _is_step(path: Path) -> bool:
    return STEP.fullmatch(path.name) is not None


def _step(path: Path) -> int:
    match = STEP.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
