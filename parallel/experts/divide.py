"""Each rank of a block keeps some experts of every layer, and works for the rows of all of them.

The module of the model stays what it is: its parameters become the rank's part of them, and its
`forward` carries rows to their experts and back, and has the module's own `visit` run in between.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel.experts.exchange import ExpertRanks, announce, to_experts, to_rows
from parallel.experts.layout import side_to_shard


class Experts(Protocol):
    """What a module has that holds all experts of a layer, each a row of all of its parameters."""

    def visit(self, x_RM: Tensor, ends_E: Tensor, weights_R: Tensor, *own: Tensor) -> Tensor:
        """Each row through its expert, times its weight, (R, M); `own`: weights instead of parameters.

        Rows are sorted by expert; those of expert e end before `ends_E[e]`. `forward` is the same with
        the module's parameters, in their order.
        """
        ...


def divide(modules: Sequence[nn.Module], ranks: ExpertRanks, mesh: DeviceMesh | None) -> None:
    """Keep this rank's experts of `modules`, on meta or not, and send rows to the others'.

    `mesh` is the block's, None in a plan: then parameters are plain ones, else DTensors.
    """
    for module in modules:
        for name, whole in list(module.named_parameters(recurse=False)):
            each = whole.shape[0] // ranks.size
            own = whole.detach()[ranks.rank * each : (ranks.rank + 1) * each]
            if mesh is not None:
                own = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        module.forward = partial(_forward, module, ranks)


def placement(shards: int, parameter: nn.Parameter) -> Shard:
    """How FSDP2 shards an expert's weights over `shards` ranks."""
    dim = side_to_shard(parameter.shape, shards)
    assert dim is not None, parameter.shape  # checked before a rank started
    return Shard(dim)


@torch.compiler.disable
def _forward(
    module: Any, ranks: ExpertRanks, x_RM: Tensor, ends_E: Tensor, weights_R: Tensor
) -> Tensor:
    """As `Experts.visit`, with experts of all ranks of the block; all of them call it."""
    sizes = announce(ends_E, len(x_RM), ranks)
    x_rM, weights_r = to_experts(x_RM, weights_R.to(x_RM.dtype), sizes)
    own = [_Shared.apply(_local(p), ranks.size) for p in module.parameters(recurse=False)]
    return to_rows(module.visit(x_rM, sizes.ends_e, weights_r, *own), sizes)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Shared(torch.autograd.Function):
    """Weights whose gradient is of the rows of `size` ranks.

    FSDP2 averages it over the ranks that have these weights: so many times fewer than have rows.
    """

    @staticmethod
    def forward(context: Any, weights: Tensor, size: int) -> Tensor:
        context.size = size
        return weights.view_as(weights)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / context.size, None
