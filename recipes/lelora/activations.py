"""EVA: directions in which the inputs of a layer vary most, found before training.

    N inputs of a layer, r rows

peft finds them by an incremental decomposition on one process. Here every rank sums the products of its
inputs, the sums are added over ranks, and their eigenvectors are the directions: the same subspace, for
a model that no process holds whole. Every matrix keeps the same rank (EVA's rho = 1).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.lelora.inject import Target
from recipes.lelora.credit import evaluating
from recipes.lelora.shards import put
from recipes.task import Batch


@torch.no_grad()
def input_products(
    model: nn.Module,
    targets: Sequence[Target],
    forward: Callable[[Batch], object],
    batches: Sequence[Batch],
) -> dict[str, Tensor]:
    """Sum of x x^T over all inputs x that each target sees, (N, N) in fp32. Collective.

    What is padding in a batch is counted, too: a layer does not know it.
    """
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x_TN = inputs[0].detach().flatten(0, -2).float()
            product = x_TN.T @ x_TN
            sums[name] = sums[name] + product if name in sums else product

        return look

    handles = [
        model.get_submodule(target.name).register_forward_pre_hook(hook(target.name))
        for target in targets
    ]
    try:
        with evaluating(model):
            for batch in batches:
                forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    for target in targets:
        if dist.is_initialized():
            dist.all_reduce(sums[target.name])
    return {target.name: sums[target.name] for target in targets}


@torch.no_grad()
def give_directions(
    model: nn.Module, targets: Sequence[Target], products: dict[str, Tensor], rank: int
) -> None:
    """Make A of each of peft's layers the top eigenvectors of its inputs; B stays 0. Collective."""
    for target in targets:
        product = products[target.name]
        directions_NN = torch.linalg.eigh(product.double()).eigenvectors.float()
        top_rN = directions_NN.flip(1)[:, :rank].T.contiguous()
        signs_r = torch.where(
            top_rN.gather(1, top_rN.abs().argmax(1, keepdim=True))[:, 0] < 0, -1.0, 1.0
        )
        top_rN = top_rN * signs_r[:, None]
        if dist.is_initialized():
            dist.broadcast(top_rN, src=0)
        put(model.get_submodule(target.name).get_parameter("lora_A.default.weight"), top_rN)
