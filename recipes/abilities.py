"""What a task may do besides: each a protocol of its own, which the trainer looks for.

A task has the methods of `recipes.task.Task`, and of these what it needs; nothing has to be inherited.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from parallel.repacking.ranks import PlannedRanks
from parallel.sequence import SequenceRanks
from recipes.task import Batch


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
    resumed: bool = False
    """A checkpoint is loaded next: whatever the model begins with is overwritten."""


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
class HasEmbeddingTables(Protocol):
    """A task whose models have embedding tables, whose rows ranks can divide (`parallel.tables`)."""

    def tables(self, model: nn.Module, /) -> Sequence[nn.Module]:
        """Modules of `model` with one parameter (V, D), whose `forward(ids)` gives its rows by number.

        Nothing else reads the parameter, and all ranks call them equally often.
        """
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
