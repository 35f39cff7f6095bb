"""Joining everything that a run needs, once, before the loop starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.host import all_sum, broadcast
from parallel.mesh import build_mesh
from parallel.torch_private import check_private_apis, limit_waits
from recipes.abilities import HasRates, Steering, Steers, Training
from recipes.task import DataError, Samples, Task
from trainer.checkpoint.best import Best, agree_if_better, known_best
from trainer.checkpoint.continuity import DataIdentity, check_epochs, goes_on
from trainer.checkpoint.loader import find, load
from trainer.checkpoint.saver import Saved, Saver
from trainer.config import Config
from trainer.data import Step, check_enough, fingerprint, training_steps
from trainer.enter import enter_run_dir
from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.guard import Guard
from trainer.launch import Invocation
from trainer.model import build_model
from trainer.optim import build_optimizer, learning_rate
from trainer.plan import Plan, make_plan
from trainer.plugins import own_nodes, tasks
from trainer.replicas import check_replicas
from trainer.sharing import check_experts, check_tables, share_samples
from trainer.watch.clock import Clock
from trainer.watch.watch import Watch


@dataclass
class State:
    """How far a run is; everything else follows from the configuration and the seed."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed: the position in the data."""
    evaluated: int = 0
    """The step of the last evaluation."""
    best: Best | None = None
    """The best evaluation so far, where `checkpoint.highest` or `checkpoint.lowest` is set."""


@dataclass
class Job:
    """All parts of a run on one rank."""

    config: Config
    plan: Plan
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_samples: Samples
    eval_samples: Samples | None
    device: torch.device
    data_rank: int
    """This rank among those that see different samples."""
    saver: Saver
    guard: Guard
    watch: Watch
    state: State = field(default_factory=State)
    steering: Steering | None = None
    """What the task does between steps, if it does anything."""
    saved_step: int = -1
    """The step of the newest checkpoint that this run wrote or read."""

    @cached_property
    def data_identity(self) -> DataIdentity:
        """What decides which sample has which number."""
        return DataIdentity(self.config.trainer.seed, fingerprint(self.train_samples))

    @cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that train, shared ones once; steps do not look through all modules anew."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def clock(self) -> Clock:
        """Where the time of a step goes."""
        return self.watch.clock

    def steps(self) -> Iterator[Step]:
        """The steps that are left."""
        return training_steps(
            self.task,
            self.train_samples,
            self.plan,
            start=self.state.samples,
            steps=max(self.plan.steps - self.state.step, 0),
            rank=self.data_rank,
            seed=self.config.trainer.seed,
            workers=self.config.trainer.workers,
            device=self.device,
        )

    def evaluation_due(self) -> bool:
        """Whether the present step is one to evaluate after, and has not been yet."""
        step, every = self.state.step, self.config.trainer.eval_every
        due = every > 0 and step > 0 and (step % every == 0 or step == self.plan.steps)
        return due and self.state.evaluated != step

    def note_if_best(self, figures: Mapping[str, float]) -> bool:
        """Whether the present step's evaluation is the best so far, on every rank."""
        found = agree_if_better(self.config.checkpoint, self.state.best, self.state.step, figures)
        self.state.best = found or self.state.best
        return found is not None

    def save(self, again: bool = False) -> None:
        """Begin a checkpoint of this moment, unless there is one, or `again` if it knows too little."""
        if again or self.saved_step != self.state.step:
            with self.watch.paused():
                if self.config.trainer.check_replicas:
                    check_replicas(self.model, self.state.step)
                self._begin_save()
            self.saved_step = self.state.step

    def check(self) -> None:
        """Compare the copies of the weights, if it is time."""
        every, step = self.config.trainer.check_replicas, self.state.step
        if every and step % every == 0:
            check_replicas(self.model, step)

    def finish_save(self) -> None:
        """Wait until the save under way, if any, is on the disk, and report it."""
        with self.watch.paused():
            self._report(self.saver.wait())

    def report_saves(self) -> None:
        """Report the save that has ended since the last call, if one has."""
        self._report(self.saver.ended())

    def _report(self, saved: Saved | None) -> None:
        if saved is not None:
            self.watch.saved(saved.step, saved.path, saved.seconds)

    def _begin_save(self) -> None:
        self.guard.read()
        progress = {
            "step": self.state.step,
            "samples": self.state.samples,
            "evaluated": self.state.evaluated,
            "best": self.state.best.entry() if self.state.best is not None else None,
            "skipped": self.guard.skipped,
            "batch_size": self.config.trainer.batch_size,
            **self.data_identity.entries(),
            "recipe": self.config.recipe,
            "tokens": self.watch.tokens,
            "tracker": self.watch.tracker_id,
        }
        steering = self.steering.state() if self.steering is not None else {}
        self._report(self.saver.save(self.model, self.optimizer, progress, self.device, steering))

    def restore(self, checkpoint: Path) -> None:
        """Go back to a checkpoint."""
        steering = self.steering.state() if self.steering is not None else {}
        progress = load(checkpoint, self.model, self.optimizer, self.device, steering)
        trainer = self.config.trainer
        check_epochs(progress, trainer.batch_size, trainer.epochs)
        same = goes_on(progress, self.data_identity, trainer.change_data)
        samples = progress["samples"] if same else 0
        best = None
        if same:
            best = known_best(self.config.checkpoint, progress, self.saver.checkpoints)
        self.state = State(progress["step"], samples, progress["evaluated"], best)
        self.saved_step = self.state.step
        self.guard.skipped = progress["skipped"]
        self.watch.tokens = progress["tokens"]
        self.watch.skipped = progress["skipped"]
        self.watch.tracker_id = progress["tracker"]
        if self.steering is not None:
            try:
                self.steering.load(steering)
            except ValueError as error:
                raise CheckpointError(f"{checkpoint}: {error}") from error


def make_task(config: Config, world_size: int | None = None) -> Task:
    """The task that the configuration names; without ranks, its samples are whole ones."""
    kind = tasks()[config.task.name]
    try:
        own = {node: getattr(config, node) for node in own_nodes(kind)}
        task = kind(
            task=config.task, model=config.model, data=config.data, seed=config.trainer.seed, **own
        )
        if world_size is not None:
            share_samples(task, config, world_size)
            check_experts(task, config, world_size)
            check_tables(task, config, world_size)
        return task
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_task(task: Task) -> None:
    """The task's look at the outside world; its `ValueError`s are about the configuration."""
    try:
        task.check()
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def assemble(config: Config, invocation: Invocation, device: torch.device) -> Iterator[Job]:
    """Build every part on this rank, restore a checkpoint if asked to, and clean up at the end."""
    check_private_apis()
    run_dir = enter_run_dir(config)
    task = make_task(config, dist.get_world_size())
    check_task(task)
    train_samples, eval_samples = task.train_samples(), task.eval_samples()
    _check_same(" ".join(fingerprint(s) for s in (train_samples, eval_samples) if s is not None))
    check_enough(train_samples, config.trainer.batch_size)
    plan = make_plan(config, dist.get_world_size(), len(train_samples), task.axes)
    mesh = build_mesh(plan.mesh, device.type)
    share_samples(task, config, plan.world_size, mesh)
    model, chosen = build_model(config, task, mesh, device)
    job = Job(
        config=config,
        plan=plan,
        task=task,
        model=model,
        optimizer=build_optimizer(
            model.parameters(),
            config.optim,
            task.own_rates(model) if isinstance(task, HasRates) else None,
        ),
        train_samples=train_samples,
        eval_samples=eval_samples,
        device=device,
        data_rank=data_parallel_rank(mesh),
        saver=Saver(config.checkpoint, run_dir, config.launch.timeout),
        guard=Guard(config.trainer.nonfinite_limit),
        watch=Watch(config, invocation, plan, run_dir, device, chosen),
    )
    job.saver.prepare(model, job.optimizer, device)
    try:
        checkpoint = find(config.trainer.resume, job.saver.checkpoints)
        job.steering = _steering(job, run_dir, resumed=checkpoint is not None)
        limit_waits(config.launch.timeout)
        if checkpoint is not None:
            job.restore(checkpoint)
            if config.trainer.resume != "auto" and dist.get_rank() == 0:
                _go_back(job)
        job.watch.open(task, model, job.state.step, checkpoint)
        yield job
    except RunError:
        # All ranks meet it at the same place, so that a save under way can still end.
        with suppress(CheckpointError):
            job.saver.wait()
        job.watch.abandon()
        raise
    except BaseException:
        job.watch.abandon()
        raise


def _go_back(job: Job) -> None:
    """Or the next start would take a newer checkpoint, which this one was to get away from."""
    if undone := job.saver.checkpoints.undo_after(job.state.step):
        print(f"later checkpoints are put aside: {', '.join(path.name for path in undone)}")


def _steering(job: Job, run_dir: Path, resumed: bool) -> Steering | None:
    """What the task does between steps, if it does anything."""
    if not isinstance(job.task, Steers):
        return None
    config, plan = job.config, job.plan
    training = Training(
        model=job.model,
        optimizer=job.optimizer,
        device=job.device,
        run_dir=run_dir,
        seed=config.trainer.seed,
        steps=plan.steps,
        ranks=plan.data_parallel,
        rank=job.data_rank,
        micro_batch_size=plan.micro_batch_size,
        max_norm=config.optim.max_norm,
        rate=lambda step: (
            learning_rate(config.optim, step, plan.steps) / max(config.optim.lr, 1e-30)
        ),
        resumed=resumed,
    )
    try:
        return job.task.steering(training)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_same(found: str) -> None:
    """Raise `DataError` on every rank if ranks found different data; `found` is its fingerprint."""
    if all_sum([float(broadcast(found) != found)])[0]:
        raise DataError(
            "ranks found different training data: give every node the same files, or set data.files"
        )


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """This rank's number among those that see different samples."""
    coordinate: Any = mesh.get_coordinate()
    at = dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return int(at.get("replicate", 0) * sizes["shard"] + at["shard"])
