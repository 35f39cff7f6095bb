"""What the layers that are sharded over one process group share: links, slots and staging.

Layers that give their parameters back after the forward pass take turns in a few slots, each as large
as the largest of these layers; the others (the root, layers that stay gathered) have one of their own.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from collectives.config import CollectivesConfig
from collectives.symmetric.fabric import Fabric, connect, end_process
from collectives.symmetric.transport import PeerError
from collectives.tide.layout import Layout
from collectives.tide.rail import RAIL_CHANNELS, Rail
from collectives.tide.reduce_scatter import ReduceScatter, staging_size
from collectives.tide.slots import Slot, channels_of
from collectives.tide.sums import forget
from parallel.tide.reach import Reach
from parallel.tide.room import Needs, check_room

TIMEOUT = 60.0
"""Seconds, where nobody said anything else."""


class Layer(Protocol):
    """What the pool must know of a layer."""

    name: str

    @property
    def reshards(self) -> bool:
        """Whether it gives its parameters back after the forward pass."""
        ...

    @property
    def prefetched(self) -> int:
        """Layers that are gathered ahead while it is in use."""
        ...

    def lay_out(self) -> Layout:
        """Where its tensors lie in a slot."""
        ...

    def enter(self, slot: Slot, layout: Layout) -> None:
        """Make the slot's memory that of the gathered parameters, for good."""
        ...


@dataclass
class Pool:
    """The links, slots and staging of one process group; built in the first all-gather."""

    process_group: dist.ProcessGroup
    config: CollectivesConfig
    node_size: int
    device: torch.device
    reach: Reach
    give_up: Callable[[PeerError], None] = end_process
    layers: list[Layer] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    fabric: Fabric | None = None
    reduce: ReduceScatter | None = None
    rail: Rail | None = None
    put_off: bool = False

    def build(self) -> None:
        """Allocate everything, once; every rank of the group comes here at the same time.

        Raises `ValueError` if there are fewer slots than layers in use at the same time.
        """
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what is made here outlives an evaluation
            timeout = self.config.timeout or TIMEOUT
            self.fabric = connect(
                self.process_group, self.node_size, timeout, self.config.multicast, self.device,
                self.reach.transport or "", self.give_up,
            )  # fmt: skip
            layouts = {layer.name: layer.lay_out() for layer in self.layers}
            rotating = [layer for layer in self.layers if layer.reshards]
            size = max((layouts[layer.name].nbytes for layer in rotating), default=0)
            sizes = [size] * min(self._num_slots(rotating), len(rotating))
            private = [layer for layer in self.layers if not layer.reshards]
            shared = len(sizes)
            sizes += [layouts[layer.name].nbytes for layer in private]
            if self.device.type == "cuda":
                staging = staging_size(self.fabric.topology, self.config.chunk)
                check_room(
                    Needs(sizes[:shared], sizes[shared:], staging), self.process_group, self.device
                )
            self.slots = [
                Slot(self.fabric, self.fabric.allocate(nbytes), index, self.config.poison)
                for index, nbytes in enumerate(sizes)
            ]
            channel = channels_of(len(self.slots))
            if self.fabric.network is not None:
                self.rail = Rail(self.fabric.network, channel, self.config.pacing)
                channel += RAIL_CHANNELS
            self.reduce = ReduceScatter(self.fabric, self.config.chunk, channel)
            for number, layer in enumerate(rotating):
                layer.enter(self.slots[number % shared], layouts[layer.name])
            for number, layer in enumerate(private, start=shared):
                layer.enter(self.slots[number], layouts[layer.name])

    def _num_slots(self, rotating: Sequence[Layer]) -> int:
        """As many as layers are gathered at once: one in use, and those that are prefetched."""
        depth = max((layer.prefetched for layer in rotating), default=0)
        if self.config.slots is None:
            return depth + 1
        if self.config.slots <= depth and len(rotating) > self.config.slots:
            raise ValueError(
                f"collectives.slots={self.config.slots} cannot hold a layer and the {depth} that are "
                f"prefetched: set collectives.slots={depth + 1}, or null to have it worked out"
            )
        return self.config.slots

    def say_put_off(self, name: str, tenant: str) -> None:
        """Warn, once, that prefetching does not work as it should."""
        if not self.put_off:
            self.put_off = True
            warnings.warn(
                f"{name} is not gathered ahead while {tenant} uses its memory: layers run in another "
                "order than they are registered; a larger collectives.slots may help",
                stacklevel=2,
            )

    @property
    def slot_reuse(self) -> bool:
        """Whether gradients are staged in slots: many small turns would cost a GPU's host too much."""
        configured = self.config.slot_reuse
        return self.device.type == "cuda" if configured is None else configured

    @property
    def cast_ahead(self) -> bool:
        """Whether shards are cast before their turn, and kept."""
        configured = self.config.cast_ahead
        return self.device.type == "cuda" if configured is None else configured

    @property
    def slot_nbytes(self) -> int:
        """Symmetric memory of the slots on this rank."""
        return sum(slot.memory.nbytes for slot in self.slots)

    @property
    def staging_nbytes(self) -> int:
        """Symmetric memory of the reduce-scatter on this rank."""
        return self.reduce.staging_nbytes if self.reduce is not None else 0

    def close(self) -> None:
        """Give the links back; the memory goes with its last tensor."""
        if self.fabric is not None:
            self.fabric.close()
            forget(self.device)


def default_node_size() -> int:
    """Ranks on this machine, as launchers say it; all of them if none does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
