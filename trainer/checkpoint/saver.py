"""Writing checkpoints while training goes on, and the order in which that is safe.

    every rank   queue copies of the state to host memory     (trainer/checkpoint/staging.py)
    in background, all ranks together:
    every rank   write its shards, sync, checksum them
    rank 0       write trainer.json, then manifest.json: complete
    rank 0       rename, point `latest` to it, drop old ones

A rank that dies on the way leaves a folder that nothing reads. One save is under way at a time.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from collectives.host import broadcast, gather_objects
from trainer import stop
from trainer.checkpoint import manifest
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.durable import write_durably
from trainer.checkpoint.folder import Checkpoints
from trainer.checkpoint.staging import Staging, sizes_of
from trainer.checkpoint.state import tensors_of
from trainer.errors import CheckpointError
from trainer.failure import waited_in_vain


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete and on the disk."""

    step: int
    path: Path
    seconds: float
    """From the call to the end, most of it in the background."""


class Saver:
    """Writes the checkpoints of one run folder. Every rank makes the same calls.

    A rank waits for the others for `timeout` seconds at most.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, timeout: float = 600.0) -> None:
        self.config, self.checkpoints = config, Checkpoints(run_dir / "checkpoints")
        self._timeout = timedelta(seconds=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Saved] | None = None
        self._staging: Staging | None = None
        self._reserved: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after this step."""
        return self.config.every > 0 and step % self.config.every == 0

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        """After the first update, when all of the state exists, take host memory for copies of it."""
        saves = self.config.every or self.config.best_by
        if not (self.config.background and saves and device.type == "cuda"):
            return
        staging = self._staging = Staging(device)

        def reserve() -> None:
            torch.cuda.set_device(device)  # of this thread, which writes checkpoints later
            staging.reserve(sizes_of(model, optimizer))

        def once(*_: Any) -> None:
            if self._reserved is None:
                self._reserved = self._thread.submit(reserve)

        optimizer.register_step_post_hook(once)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        device: torch.device,
        steering: dict[str, torch.Tensor] | None = None,
    ) -> Saved | None:
        """Begin to save; `progress` is plain data with at least `step`, `steering` the task's own.

        Returns the save before this one, if that ended just now. Raises `CheckpointError`.
        """
        begin = time.monotonic()
        before = self.wait()
        state = tensors_of(model, optimizer, device, steering=steering)
        self._on_first_rank(lambda: self.checkpoints.make_room(_size(state)))
        plain = {**progress, "device": device.type, "world_size": dist.get_world_size()}
        if self._group is None:  # a group of its own: the main thread goes on using the default one
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        if self.config.background:
            if self._reserved is not None:
                self._reserved.result()
            if self._staging is None:
                self._staging = Staging(device)
            staged = self._staging.copy(state, model, optimizer)
            self._pending = self._thread.submit(self._write, staged, plain, begin)
        else:
            self._pending = Future()
            try:
                self._pending.set_result(self._write(state, plain, begin))
            except CheckpointError as error:
                self._pending.set_exception(error)
        return before

    def ended(self) -> Saved | None:
        """The save that ended since the last look, on this rank; never waits."""
        if self._pending is None or not self._pending.done() or self._pending.exception():
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """Wait for the save under way, if there is one. Raises its `CheckpointError`."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def _write(self, state: dict[str, Any], progress: dict[str, Any], begin: float) -> Saved:
        """Everything after staging; all ranks are in here together."""
        step = progress["step"]
        folder = self.checkpoints.being_written(step)
        if self._staging is not None:
            self._staging.wait()
        try:
            writer = FileSystemWriter(folder)
            save_tensors(state, storage_writer=writer, process_group=self._group)
            files = self._describe_shards(folder)
            self._on_first_rank(lambda: self._commit(folder, files, progress), self._group)
        except (Exception, CheckpointException) as error:
            stop.ask()  # all ranks leave the loop together, and meet this error in `wait`
            if isinstance(error, CheckpointError) or waited_in_vain(error):
                raise
            cause = _first(error)
            hint = ": free some space, or set another run.dir" if isinstance(cause, OSError) else ""
            raise CheckpointError(f"cannot write {folder}: {_said(error)}{hint}") from error
        return Saved(step, self.checkpoints.of_step(step), time.monotonic() - begin)

    def _describe_shards(self, folder: Path) -> dict[str, Any]:
        """Sizes and checksums of what all ranks wrote, worked out by each for its own files."""
        rank = dist.get_rank()
        try:
            own: Any = {p.name: manifest.describe_file(p) for p in folder.glob(f"__{rank}_*")}
        except OSError as error:  # the others are waiting, and must hear of it
            own = f"cannot read {folder} again: rank {rank}: {error.strerror}: set another run.dir"
        except Exception as error:
            own = f"cannot read {folder} again: rank {rank}: {_said(error)}"
        parts = gather_objects(own, self._group)
        for part in parts:
            if isinstance(part, str):
                raise CheckpointError(part)
        return {name: entry for part in parts for name, entry in part.items()}

    def _commit(self, folder: Path, files: dict[str, Any], progress: dict[str, Any]) -> None:
        """Make what all ranks wrote the newest checkpoint, and drop the oldest."""
        write_durably(folder / "trainer.json", json.dumps(progress, indent=1))
        for name in (".metadata", "trainer.json"):
            files[name] = manifest.describe_file(folder / name)
        manifest.write_manifest(folder, files)
        spared = [self.checkpoints.commit(progress["step"])]
        if best := progress.get("best"):
            spared.append(self.checkpoints.of_step(best["step"]))
        self.checkpoints.drop_old(self.config.keep, self.config.keep_every, spared)

    def _on_first_rank(
        self, action: Callable[[], None], group: dist.ProcessGroup | None = None
    ) -> None:
        """Run `action` on rank 0 while the others wait; its failure fails every rank."""
        problem = None
        if dist.get_rank() == 0:
            try:
                action()
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                where = self.checkpoints.path
                problem = f"cannot write under {where}: {error.strerror}: set run.dir"
            except Exception as error:  # whatever it is, the others wait for this rank
                problem = f"cannot write under {self.checkpoints.path}: {_said(error)}"
        if problem := broadcast(problem, group):
            raise CheckpointError(problem)


def _size(state: Mapping[str, Any]) -> int:
    """Bytes of a nested state, over all ranks: sharded tensors know their whole shape."""
    return sum(
        _size(value) if isinstance(value, Mapping) else value.numel() * value.element_size()
        for value in state.values()
    )


def _first(error: BaseException) -> BaseException:
    """The first rank's own, of an error that wraps those of all ranks."""
    failures = getattr(error, "failures", None)
    return sorted(failures.items())[0][1][0] if failures else error


def _said(error: BaseException) -> str:
    """Its first line that says something, and whose it is."""
    failures, inner = getattr(error, "failures", None), _first(error)
    whose = f"rank {min(failures)}: " if failures else ""
    lines = str(inner).splitlines()
    return f"{whose}{type(inner).__name__}: {lines[0] if lines else ''}"
