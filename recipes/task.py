"""The task protocol: everything the trainer asks of a recipe, and all it knows about one.

A task is an ordinary class. A package offers it through an entry point of the group
`springtide.tasks`, and `python -m trainer task=NAME` finds it; nothing has to be inherited.
`docs/writing-a-task.md` walks through a complete one.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from parallel.repacking.ranks import PlannedRanks
from parallel.sequence import SequenceRanks

Batch = Mapping[str, Any]
"""Tensors and plain numbers by name. The trainer moves the tensors to the device, nothing else."""


class DataError(Exception):
    """Data that cannot be used: what was found, what was expected, which key to set. Exit code 3."""


class Samples(Protocol):
    """A map-style dataset: any sample can be read at any time, which is what makes resume exact.

    It may also have a method `fingerprint() -> str`: equal where every index gives an equal sample,
    on whatever machine. Ranks compare it, and a run that is resumed compares it with the run before.
    Without it, their number is compared (`trainer.data.fingerprint`).
    """

    def __len__(self) -> int:
        """Samples in one epoch, at least 1."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One sample; `index` is in [0, len)."""
        ...


class Task(Protocol):
    """Model, data, loss as sum and count, evaluation, and what to report."""

    configs: ClassVar[Mapping[str, type]]
    """Dataclasses of the configuration nodes `task`, `model` and `data`; their fields are the keys
    that users may set, their `__post_init__` raises `ValueError` for values it cannot accept. A node
    of another name is the task's own, and its constructor gets it by that name."""
    axes: ClassVar[frozenset[str]]
    """Mesh axes that the task can run on; every task can run on `replicate` and `shard`."""

    def __init__(self, *, task: Any, model: Any, data: Any, seed: int) -> None: ...

    def check(self) -> None:
        """Look at the outside world (files, tokenizers) before any rank starts.

        Raises `ValueError` for configuration and `DataError` for data; must not allocate much.
        """
        ...

    def build_model(self) -> nn.Module:
        """The model on the meta device, as one process would run it."""
        ...

    def init_weights(self, module: nn.Module) -> None:
        """Initialise the direct parameters and buffers of one module of the model.

        Called once for each module that has any, with whole tensors and a random state that
        depends on the seed and the module's name only, so the weights do not depend on the ranks.
        """
        ...

    def weights_folder(self) -> Path | None:
        """A folder of safetensors to load over the initial weights, or None."""
        ...

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> Mapping[str, Any]:
        """Where the folder keeps each tensor of `model`, given the names that it stores.

        A value is a stored name, or a function that makes the whole tensor out of a reader of
        stored ones. `{name: name for name in stored}` serves when the names agree.
        """
        ...

    def train_samples(self) -> Samples:
        """What is trained on; the trainer shuffles and shards it."""
        ...

    def eval_samples(self) -> Samples | None:
        """The held-out part, or None for a task without evaluation."""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Join samples into a batch on the CPU; runs in background workers."""
        ...

    def count(self, batch: Batch) -> int:
        """How many labels the batch holds: the weight of its loss. Read before the forward pass."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss *summed* over the labels of `batch`, a scalar with a gradient."""
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | float]:
        """Named sums over the batch; the trainer adds them over batches and ranks, in double precision.

        A sum may be a tensor, of one shape in all batches. So a task whose figures are no sums, such
        as an AUC, gets every score: each sample puts its own at its own place among zeros.
        """
        ...

    def summarize(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Turn the sums of a whole evaluation into the figures to report; tensors are on the CPU."""
        ...

    def flops(self, batch: Batch) -> float:
        """Floating-point operations that a forward and backward pass over `batch` must do."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Lines for the run's header: what is trained on what."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """What a task may add for `python -m trainer.inspect_data`: its samples in words."""

    def show(self, sample: Any) -> Iterator[str]:
        """Lines on one sample: everything that the model sees of it."""
        ...

    def survey(self) -> Mapping[str, str]:
        """Lines on all training samples, by name; a line may have breaks in it."""
        ...


@runtime_checkable
class Locates(Protocol):
    """What a task may add so that a batch that stands out can be found in the files it is from."""

    def where(self, index: int, /) -> Iterator[str]:
        """Which part of which file or table the training sample `index` is made of."""
        ...


@dataclass(frozen=True)
class Training:
    """What a task that steers gets to work with: the parts of a run, once they are joined."""

    model: nn.Module
    """Sharded, with its weights."""
    optimizer: torch.optim.Optimizer
    """Over the parameters that train. Steps may be hooked into."""
    device: torch.device
    run_dir: Path
    seed: int
    steps: int
    """Optimizer steps of the whole run."""
    ranks: int
    """Ranks that see different samples."""
    rank: int
    """This one among them."""
    micro_batch_size: int
    max_norm: float
    """Gradients are scaled down to this norm; 0: never."""
    rate: Callable[[int], float]
    """Learning rate of a step, as a share of the peak."""


class Steering(Protocol):
    """What a task does between optimizer steps. Every rank makes the same calls."""

    def after_step(self, step: int, norm: Tensor) -> None:
        """Optimizer step number `step` is done, and gradients are gone; `norm` was theirs."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides model and optimizer: tensors whose names and shapes
        do not change in a run. Those that are not sharded are the same on every rank."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; model and optimizer are restored already.

        Raises `ValueError` if the run around it is another.
        """
        ...


@runtime_checkable
class Steers(Protocol):
    """A task that looks after the model between steps. Not every task has to."""

    def steering(self, training: Training) -> Steering | None:
        """Called once, before the first step or a restore; None: nothing to do in this run.

        Raises `ValueError` for configuration.
        """
        ...


class Work(Protocol):
    """A task that trains nothing: it makes something on all ranks, and goes on where it was stopped.

    The trainer brings ranks, folder, signals and figures. It may have `panels`, too (`HasPanels`).
    """

    configs: ClassVar[Mapping[str, type]]
    """As in `Task`; `model` may be absent."""
    axes: ClassVar[frozenset[str]]
    """As in `Task`."""

    def __init__(self, *, task: Any, model: Any, data: Any, seed: int) -> None: ...

    def check(self) -> None:
        """As in `Task`."""
        ...

    def describe(self) -> Mapping[str, str]:
        """As in `Task`."""
        ...

    def work(
        self, folder: Path, device: torch.device, stopping: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Make in `folder`, on every rank together, what is not there yet; returns figures to report.

        `stopping()` says whether this rank has been asked to stop: look often, leave what is whole, and
        return None on every rank. The same call with the same configuration goes on from there, on any
        number of ranks.
        """
        ...


@dataclass(frozen=True)
class Stage:
    """One task of a chain."""

    name: str
    """Of its folder, inside the chain's."""
    nodes: Mapping[str, Any]
    """`task` is its whole node; other nodes are laid over those of the chain."""


class Chain(Protocol):
    """A task that is a row of others, each of which finds what those before it have left.

    Each runs as it would alone, in a folder of its own. What has weights to export is exported to
    `exported` in there.
    """

    configs: ClassVar[Mapping[str, type]]
    """As in `Task`: all nodes that the stages have."""
    axes: ClassVar[frozenset[str]]
    """As in `Task`."""

    def __init__(self, *, task: Any, model: Any, data: Any, seed: int) -> None: ...

    def stages(self, folder: Path) -> Sequence[Stage]:
        """What to run, in order, with the chain's own `folder`."""
        ...


class Exports(Protocol):
    """What a task has besides, if `python -m trainer.export` is to write its weights."""

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """Declare the command-line options of `export`."""
        ...

    def build_model(self) -> nn.Module:
        """As in `Task`."""
        ...

    def export(
        self,
        model: nn.Module,
        read: Callable[[Sequence[str]], dict[str, Tensor]],
        out: Path,
        options: Namespace,
    ) -> str:
        """Write what users of the model need into the empty folder `out`.

        `model` is what `build_model` gave; `read` reads whole tensors by the names of its state dict:
        read a layer at a time. Returns what was written, in a few words.
        """
        ...


@runtime_checkable
class SharesSequences(Protocol):
    """What a task has whose `axes` include `sequence`: ranks share the tokens of a micro-batch."""

    def share_sequences(self, ranks: SequenceRanks, /) -> None:
        """From now on, `collate` keeps this rank's tokens only, and `loss` works with the others.

        Called before `check` with `ranks.group` None, to raise `ValueError` for what cannot be shared,
        and again on each rank before `build_model`. All ranks of the group get the same samples; sums,
        counts and flops are of a rank's own tokens.
        """
        ...


@runtime_checkable
class PlansSamples(Protocol):
    """What a task has besides, if `parallel.sequence.max_parent` is to be for it.

    A planner spreads the samples of every micro-batch over all ranks.
    """

    def plan_samples(self, ranks: PlannedRanks, /) -> None:
        """As `SharesSequences.share_sequences`; before `check`, `ranks.groups` is None."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """A task whose models have mixtures of experts, which ranks can divide (`parallel.experts`)."""

    def experts(self, model: nn.Module, /) -> Sequence[nn.Module]:
        """The modules of `model` that hold the experts of a layer: `parallel.experts.divide.Experts`."""
        ...


@runtime_checkable
class Foresees(Protocol):
    """A task whose batches differ in size, and that knows more of a step than its model shows."""

    def largest(self, batch: Batch, /) -> Batch:
        """What a rank may have to hold at most, for the memory of a dry run, beside an ordinary one."""
        ...

    def foresee(self, batch: Batch, /) -> Mapping[str, str]:
        """Lines of a dry run on an ordinary batch."""
        ...


@runtime_checkable
class HasRates(Protocol):
    """A task some of whose parameters have a learning rate of their own. Not every task has to."""

    def own_rates(self, model: nn.Module, /) -> Mapping[nn.Parameter, float]:
        """Peak learning rates of these; the others' is `optim.lr`. Both follow the same schedule."""
        ...


@runtime_checkable
class HasFigures(Protocol):
    """A task that adds figures of its own to the row of each report."""

    def figures(self, step: int, steps: int, seconds: Sequence[float], /) -> Mapping[str, Any]:
        """Numbers, lists of them, or words, by name, of the `steps` steps up to `step`.

        Words are said on the console, too.

        `seconds`: what each rank's forward and backward pass took a step, without the communication
        that it waited for. Called on rank 0 alone: it must not talk to other ranks.
        """
        ...


@runtime_checkable
class HasPanels(Protocol):
    """A task that adds panels of its own to the run's report. Not every task has to."""

    def panels(self) -> Sequence[Mapping[str, Any]]:
        """All panels as they are now, as plain data; `docs/writing-a-task.md` has the kinds.

        Called on rank 0 alone after each evaluation: it must not talk to other ranks.
        """
        ...
