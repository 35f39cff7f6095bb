"""Tasks that do not train: work in one go, and chains of stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch


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
