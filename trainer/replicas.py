"""Do the copies of the weights still agree? What a bad chip or a flipped bit would otherwise hide.

Ranks that hold the same part of a parameter (`parallel.replicate`, and what is not sharded at all) have
the same bits after every step: their gradients are averaged, and their optimizers do the same. Each sums
the bits of its parts in whole numbers that wrap around, which no order of summation changes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from collectives.host import gather_objects
from trainer.errors import RunError

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLACES = 65_521
"""A prime: bits count by their place modulo this, so that two that change places are noticed."""
CHUNK = 1 << 22
"""Elements that are looked at together: eight bytes each, for a moment."""

Part = tuple[tuple[int, ...], int]
"""Which part of a parameter a rank holds, and the sum of its bits."""


class ReplicaError(RunError):
    """Copies of the weights differ."""


@torch.no_grad()
def check_replicas(model: nn.Module, step: int) -> None:
    """Raise `ReplicaError` on every rank if any two copies differ. Collective; waits for the device."""
    names, parts = [], []
    for name, parameter in model.named_parameters():
        names.append(name)
        parts.append(_part(parameter))
    sums = torch.stack([total for _, total in parts]).tolist()
    own: list[Part] = [(place, total) for (place, _), total in zip(parts, sums, strict=True)]
    for name, of_ranks in zip(names, zip(*gather_objects(own), strict=True), strict=True):
        if odd := odd_ranks(of_ranks):
            raise ReplicaError(
                f"after step {step} the copies of {name} differ: other bits on rank "
                f"{', '.join(map(str, odd))}, whose memory or arithmetic is at fault; checkpoints "
                "are of copies that agreed"
            )


def odd_ranks(parts: Sequence[Part]) -> list[int]:
    """Ranks whose sum is not that of most ranks with the same part; all, where there is no most."""
    found = []
    for place in dict.fromkeys(place for place, _ in parts):
        holders = {rank: total for rank, (at, total) in enumerate(parts) if at == place}
        (usual, count), *others = Counter(holders.values()).most_common(2)
        tied = any(number == count for _, number in others)
        found += [rank for rank, total in holders.items() if tied or total != usual]
    return sorted(found)


def _part(parameter: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Which part of the parameter is here, as coordinates of the axes that shard it, and its bits."""
    place: tuple[int, ...] = ()
    local = parameter.detach()
    if isinstance(local, DTensor):
        coordinate: Any = local.device_mesh.get_coordinate() or []
        axes = zip(coordinate, local.placements, strict=True)
        place = tuple(at for at, placement in axes if not placement.is_replicate())
        local = local.to_local()
    bits = local.contiguous().view(-1).view(WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHUNK):
        some = bits[begin : begin + CHUNK]
        weights = torch.arange(some.numel(), device=bits.device).add_(begin).remainder_(PLACES)
        total += (some * weights.mul_(2).add_(1)).sum()
    return place, total
