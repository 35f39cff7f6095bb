"""Each rank keeps some rows of every table, and looks up those of all.

The module of the model stays what it is: its parameter becomes a DTensor that is sharded by rows over
all ranks, and its `forward` fetches rows. FSDP2 leaves such a parameter alone. To everything else
(optimizer, gradient norm, checkpoints on another number of ranks, export) it is a sharded parameter like
any other.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel.tables.choice import rows_each
from parallel.tables.exchange import Lookup, TableRanks


def rows_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of `mesh` in a row, those of all copies of the weights.

    Every rank calls it, at the same place.
    """
    return DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("rows",))


def divide_tables(
    modules: Sequence[nn.Module],
    ranks: TableRanks,
    mesh: DeviceMesh | None,
    dtype: torch.dtype | None,
) -> list[nn.Parameter]:
    """Keep this rank's rows of `modules`, which are on meta, and have them fetch the others'.

    Each has one parameter (V, D), and `forward` gives its rows by number. `mesh` is `rows_mesh`'s, None
    in a plan: then parameters are plain ones, those of the first rank. Returns them.
    """
    found = []
    for module in modules:
        ((name, whole),) = module.named_parameters()
        V, D = whole.shape
        each = rows_each(V, ranks.size)
        device = torch.device(mesh.device_type) if mesh is not None else whole.device
        begin = min(mesh.get_local_rank() * each, V) if mesh is not None else 0
        own: Tensor = whole.detach()[begin : begin + each]
        if mesh is not None:
            own = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(D, 1)
            )
        rows = nn.Parameter(own, requires_grad=whole.requires_grad)
        setattr(module, name, rows)
        module.forward = partial(_forward, module, Lookup(V, ranks, device, dtype))
        found.append(rows)
    return found


def in_words(module: nn.Module) -> str:
    """Of a table that is divided, for the header."""
    ((_, rows),) = module.named_parameters()
    return f"table of {rows.shape[0]:,} x {rows.shape[1]} by rows: torchrec"


@torch.compiler.disable
def _forward(module: Any, lookup: Lookup, ids: Tensor) -> Tensor:
    (rows,) = module.parameters()
    return lookup(ids, rows.to_local() if isinstance(rows, DTensor) else rows)
