"""Which ranks divide experts, and how each expert's weights are sharded over those that have it.

    rank        0   1   2   3 | 4   5   6   7      parallel.experts=4 of 8 ranks, 8 experts
    experts    01  23  45  67 | 01  23  45  67     rows travel inside 0-3 and inside 4-7;
                                                   weights are sharded over 0,4 and 1,5 and 2,6 and 3,7

A block is consecutive ranks of one node, so rows never leave it. What is no expert is sharded over all
ranks, as ever.
"""

from collections.abc import Sequence
from math import gcd

from torch.distributed.device_mesh import DeviceMesh

from parallel.experts.exchange import ExpertRanks


def experts_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The ranks of `mesh` as (replicate, if there is one,) `shard` and `experts`.

    Every rank calls it, at the same place.
    """
    names: tuple[str, ...] = ("shard", "experts")
    ranks = mesh.mesh.reshape(-1, size)
    if "replicate" in (mesh.mesh_dim_names or ()):
        names, ranks = ("replicate", *names), ranks.unflatten(0, (mesh["replicate"].size(), -1))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


def expert_ranks(grid: DeviceMesh) -> ExpertRanks:
    """This rank's block in what `experts_mesh` made."""
    group = grid.get_group("experts")
    return ExpertRanks(group.size(), grid.get_local_rank("experts"), group)


def side_to_shard(shape: Sequence[int], shards: int) -> int | None:
    """The dimension over which ranks share an expert's weights; the first counts experts.

    It divides evenly, as FSDP2 wants it; experts are few, and may be fewer than the ranks. None: no side
    does.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), None)


def check_division(
    size: int, shapes: Sequence[Sequence[int]], node_size: int, weight_ranks: int
) -> None:
    """Raise `ValueError` unless blocks of `size` ranks can divide experts with weights of `shapes`."""
    experts = gcd(*(shape[0] for shape in shapes))
    common = gcd(experts, node_size, weight_ranks)
    possible = [
        n
        for n in range(1, common + 1)
        if common % n == 0
        and (n == 1 or all(side_to_shard(shape, weight_ranks // n) for shape in shapes))
    ]
    if size not in possible:
        raise ValueError(
            f"parallel.experts={size} must divide the {experts} experts of a layer, the {node_size} "
            f"ranks of a node and the {weight_ranks} that share the weights, and leave so many for each "
            f"expert that they divide a side of its matrices: set parallel.experts to "
            f"{' or '.join(map(str, possible))}"
        )
