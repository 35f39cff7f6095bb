"""What ranks check of a table that they divide: against one process, bit for bit.

Torchrec has no fp64. So all numbers are whole ones over powers of two, with few enough digits that no
gradient or weight is rounded in fp32, in whatever order it is made.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.norm import clip, global_norm
from parallel.weights import checksum, materialize

D, COUNT = 4, 32
SIZES = {2: (9, 23), 4: (3, 5, 9, 15)}


class Model(nn.Module):
    """A table that is looked up twice, and something that FSDP2 shards."""

    def __init__(self, num_rows):
        super().__init__()
        self.table, self.shift_D = Table(num_rows), nn.Parameter(torch.empty(D))

    def forward(self, ids, more):
        x = self.table(ids) + self.shift_D
        return (x * (ids % 5 - 2)[..., None]).sum() + self.table(more).square().sum() / 2


class Table(nn.Module):
    def __init__(self, num_rows):
        super().__init__()
        self.rows_VD = nn.Parameter(torch.empty(num_rows, D))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.rows_VD)


def init(module):
    for parameter in module.parameters(recurse=False):
        parameter.random_(-4, 5)


@dataclass(frozen=True)
class Case:
    num_rows: int
    lowest: int = 0
    """No rank looks up a row below this one."""
    settings: dict = field(default_factory=dict)
    empty: bool = False
    """The first rank looks nothing up."""


def check_rows(cases):
    return [_check(case) for case in cases]


def _check(case):
    world, rank = dist.get_world_size(), dist.get_rank()
    config = ParallelConfig(tables="rows", **case.settings)
    with torch.device("meta"):
        model, alone = Model(case.num_rows), Model(case.num_rows)
    mesh = build_mesh(mesh_shape(config, world), "cpu")
    parallelize(model, mesh, config, tables=[model.table])
    optimizers = []
    for each in (model, alone):
        materialize(each, torch.device("cpu"), init, seed=1)
        optimizers.append(torch.optim.SGD(each.parameters(), lr=0.5))
    first = checksum(model.parameters())
    own, rows = -(-case.num_rows // world), model.table.rows_VD
    assert rows.to_local().shape == (max(min(own, case.num_rows - rank * own), 0), D)
    sizes = list(SIZES[world])
    if case.empty:
        sizes = [0, *sizes[1:-1], sizes[-1] + sizes[0]]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        micros = [
            [_ids(case, size, 100 * step + 10 * micro + r) for r, size in enumerate(sizes)]
            for micro in (0, 1)
        ]
        total = torch.zeros(())
        for number, of_ranks in enumerate(micros):
            set_last_micro_batch(model, last=number == 1, every=False)
            loss = model(*of_ranks[rank])
            (loss * world / COUNT).backward()
            total += loss.detach()
        dist.all_reduce(total)
        expected = sum(alone(*ids) for of_ranks in micros for ids in of_ranks)
        (expected / COUNT).backward()
        torch.testing.assert_close(total, expected)  # a square has more digits
        grads, right = [[p.grad for p in each.parameters()] for each in (model, alone)]
        assert all(torch.equal(g.full_tensor(), r) for g, r in zip(grads, right, strict=True))
        norm, _ = global_norm(grads, torch.zeros(1))
        torch.testing.assert_close(norm, nn.utils.get_total_norm(right))
        for optimizer in optimizers:
            optimizer.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        assert all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs)
    clip(grads, norm, 0.1)
    nn.utils.clip_grads_with_norm_(alone.parameters(), 0.1, norm)
    for ours, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    with torch.no_grad():  # an evaluation
        torch.testing.assert_close(model(*micros[0][rank]), alone(*micros[0][rank]))
    assert checksum(model.parameters()) == checksum(alone.parameters()) != first
    return first


def _ids(case, size, seed):
    """Numbers with repetitions, in two dimensions and in one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(case.lowest, case.num_rows, (2, size), generator=generator)
    return drawn, drawn[0, : size // 2].flip(0)
