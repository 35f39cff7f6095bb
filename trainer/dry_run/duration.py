"""How long a step may take: what the device could do, times what it does in practice.

Matrix products, attention and everything else take turns; collectives hide behind the pass that they
belong to, where they are shorter. The shares below were measured on H200s (`docs/performance.md` has the
runs); elsewhere they are a guess, and a plan says "about".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.devices import Device
from trainer.dry_run.memory import Group
from trainer.dry_run.probe import Probe
from trainer.dry_run.wire import Wire

PRODUCTS, ATTENTION, MEMORY = 0.62, 0.50, 0.65
"""Shares of the peak that matrix products and fused attention reach, and of the memory's rate."""
LINKS = {"stock": 0.5, "tide": 0.83}
NETWORK = 0.8
OPTIMIZER_BYTES = 10 * 4
"""Of a parameter in a step: its gradient read for the norm, read and written to clip it, then it, the
parameter and two moments read, and the last three written."""


@dataclass(frozen=True)
class Duration:
    """Seconds of one step on one rank."""

    forward: float
    backward: float
    optimizer: float
    exposed: float
    """Collectives that nothing hides."""

    @property
    def total(self) -> float:
        """The whole step."""
        return self.forward + self.backward + self.optimizer + self.exposed


LAYOUT_BYTES = {"stock": (4, 10), "tide": (0, 0)}
"""That a pass reads and writes for each gathered parameter to change layouts: torch copies bf16 out of
its buffer in both passes, and packs gradients as fp32."""

SHARD_BYTES = {"stock": (10, 10), "tide": (6, 0)}
"""That a pass reads and writes for each element of a rank's own shards: torch casts them to bf16 and
packs them whenever it gathers, TIDE casts ahead and keeps them."""
ALONE_BYTES = 14
"""That torch's backward pass reads and writes for each gradient where there is nobody to reduce with: it
packs them as fp32, and copies that."""


def duration(
    probe: Probe,
    flops: float,
    accumulation: int,
    groups: Sequence[Group],
    shards: int,
    wire: Wire,
    collectives: str,
    device: Device,
    rows: int = 0,
) -> Duration:
    """A step of `accumulation` micro-batches; `flops` are those of one, forward and backward.

    `rows`: elements of a rank's rows of tables.
    """
    attention = max(flops / 3 - probe.matmul_flops[0], 0.0)
    gathered = sum(g.numel for g in groups)
    layout, casts = LAYOUT_BYTES[collectives], SHARD_BYTES[collectives]
    if shards == 1:  # torch's own way, whatever the collectives
        layout, casts = (0, ALONE_BYTES), SHARD_BYTES["stock"]
    again = sum(g.numel for g in groups if g.reshards)
    own = [casts[0] * gathered / shards, casts[1] * again / shards]
    forward, backward = (
        accumulation
        * (
            probe.matmul_flops[phase] / (PRODUCTS * device.flops)
            + times * attention / (ATTENTION * device.flops)
            + (probe.moved[phase] + layout[phase] * gathered + own[phase])
            / (MEMORY * device.memory_rate)
        )
        for phase, times in ((0, 1), (1, 2.5))  # fused attention forms its scores again
    )
    trained = sum(g.trained * g.experts for g in groups) / shards + rows
    optimizer = trained * OPTIMIZER_BYTES / (MEMORY * device.memory_rate)
    pace = _seconds_a_byte(wire, collectives, device)
    exposed = max(wire.gather_forward * pace - forward, 0.0)
    exposed += max((wire.gather_backward + wire.reduce_scatter) * pace - backward, 0.0)
    exposed += (wire.all_reduce + wire.tables) * pace
    exposed += wire.rows / (LINKS["stock"] * device.link_rate)  # compute waits for them
    # Nothing hides the first layer on its way in, nor the last one's gradients on their way out.
    exposed += (wire.gather_forward + wire.reduce_scatter) / accumulation * pace / len(groups)
    return Duration(forward, backward, optimizer, exposed)


def _seconds_a_byte(wire: Wire, collectives: str, device: Device) -> float:
    """Of the slower of the two ways: links of the node, and the network."""
    if not wire.total:
        return 0.0
    inside = 1 / (LINKS[collectives] * device.link_rate)
    across = wire.across / wire.total / (NETWORK * device.network_rate)
    return max(inside, across)
