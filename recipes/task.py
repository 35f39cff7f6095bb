"""The task protocol: what the trainer asks of every recipe, and, but for what `recipes.abilities` and
`recipes.work` have, all it knows about one.

A task is an ordinary class. A package offers it through an entry point of the group
`springtide.tasks`, and `python -m trainer task=NAME` finds it; nothing has to be inherited.
`docs/writing-a-task.md` walks through a complete one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

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
