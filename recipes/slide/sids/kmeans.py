"""Residual k-means over all ranks: each level quantizes what the levels before it left over.

I items, D numbers of an item, C codes, L levels

Every rank assigns its share of the items, and sums are added over ranks. Numbers are rounded to
multiples of `GRAIN`, so that sums are sums of whole numbers and do not depend on how items are shared
out: one rank finds the centers of many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.host import gather_objects

GRAIN = 2.0**-30
SAMPLE = 64
"""The first centers are drawn from so many items for each code, at most."""


@dataclass(frozen=True)
class Quantized:
    """Codes of all items, and what they stand for."""

    codes_IL: Tensor
    centers: list[Tensor]
    """(C, D) of each level."""
    left_ID: Tensor
    """What the levels before the last left over of each item; the last level quantizes it."""


def residual_kmeans(x_ID: Tensor, sizes: Sequence[int], seed: int, rounds: int = 50) -> Quantized:
    """Quantize items, which every rank has; every rank gets the same result."""
    codes, centers = [], []
    left_ID = x_ID.double()
    for level, size in enumerate(sizes):
        before_ID = left_ID
        center_CD = kmeans(left_ID, size, seed + level, rounds)
        code_I = _gather(nearest(_share(left_ID), center_CD)[0], len(left_ID))
        codes.append(code_I)
        centers.append(center_CD)
        left_ID = left_ID - center_CD[code_I]
    return Quantized(torch.stack(codes, dim=1), centers, before_ID)


def kmeans(x_ID: Tensor, size: int, seed: int, rounds: int) -> Tensor:
    """Centers (C, D) after Lloyd's rounds until nothing changes; codes without items begin anew.

    A code without items takes the item that is farthest from its own center, if any is away from it.
    """
    whole_ID = (x_ID / GRAIN).round()
    x_ID = whole_ID * GRAIN
    center_CD = _first_centers(x_ID, size, seed)
    mine, own_ID, whole_own_ID = _share(torch.arange(len(x_ID))), _share(x_ID), _share(whole_ID)
    for _ in range(rounds):
        code_I, distance_I = nearest(own_ID, center_CD)
        sums_CD = torch.zeros(size, x_ID.shape[1], dtype=torch.int64)
        sums_CD.index_add_(0, code_I, whole_own_ID.long())
        counts_C = torch.bincount(code_I, minlength=size)
        _add_over_ranks(sums_CD, counts_C)
        new_CD = sums_CD.double() * GRAIN / counts_C.clamp(min=1)[:, None]
        dead = (counts_C == 0).nonzero()[:, 0]
        far = _farthest(distance_I, mine, len(dead))
        new_CD[dead] = center_CD[dead]
        new_CD[dead[: len(far)]] = x_ID[far]
        if torch.equal(new_CD, center_CD):
            break
        center_CD = new_CD
    return center_CD


def nearest(x_ND: Tensor, center_CD: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's nearest center, and its squared distance."""
    distance_NC = squared_distances(x_ND, center_CD)
    distance_N, code_N = distance_NC.min(1)
    return code_N, distance_N


def squared_distances(x_ND: Tensor, center_CD: Tensor) -> Tensor:
    """(N, C)."""
    cross_NC = x_ND @ center_CD.T
    squares = x_ND.square().sum(1, keepdim=True) + center_CD.square().sum(1)
    return (squares - 2 * cross_NC).clamp(min=0)


def _first_centers(x_ID: Tensor, size: int, seed: int) -> Tensor:
    """By k-means++ (Arthur & Vassilvitskii 2007): far from those already drawn, on all ranks alike."""
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(x_ID))[: SAMPLE * size]
    x_SD = x_ID[torch.from_numpy(chosen)]
    centers = [x_SD[0]]
    distance_S = (x_SD - x_SD[0]).square().sum(1)
    while len(centers) < size:
        total = distance_S.cumsum(0)
        draw = generator.random() * float(total[-1])
        at = int(torch.searchsorted(total, draw).clamp(max=len(x_SD) - 1))
        centers.append(x_SD[at])
        distance_S = torch.minimum(distance_S, (x_SD - x_SD[at]).square().sum(1))
    return torch.stack(centers)


def _farthest(distance_N: Tensor, numbers_N: Tensor, count: int) -> Tensor:
    """The numbers of the `count` farthest items over all ranks; items on their center are left out."""
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    order = distance_N.argsort(descending=True, stable=True)[:count]
    mine = [(-distance_N[n].item(), numbers_N[n].item()) for n in order if distance_N[n] > 0]
    everyone = sorted(pair for part in gather_objects(mine) for pair in part)
    return torch.tensor([int(number) for _, number in everyone[:count]], dtype=torch.int64)


def _world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _share(x_I: Tensor) -> Tensor:
    """This rank's rows: equally many, in order."""
    rank, ranks = _world()
    return x_I.tensor_split(ranks)[rank]


def _gather(code_N: Tensor, length: int) -> Tensor:
    parts = gather_objects(code_N)
    codes = torch.cat(parts)
    assert len(codes) == length
    return codes


def _add_over_ranks(*tensors: Tensor) -> None:
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)
