"""Where a new classifier begins: as a linear probe, on what the untouched encoder says of some samples.

A classifier of random weights sends noise into the encoder until it has learnt, and how soon it has is
then most of what a learning rate decides. The probe takes that out of every method alike.

X samples, D features, L labels
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.host import broadcast, gather_objects
from models.linear_probe import fit_probe
from recipes.abilities import Training
from recipes.lelora.credit import evaluating
from recipes.lelora.shards import put
from recipes.task import Batch


class Asked(NamedTuple):
    """A batch of this rank: what is in it, and how many of its samples count."""

    numbers: list[int]
    counted: int


def probe_rows(samples: int, number: int, seed: int) -> list[int]:
    """Which samples a probe sees: `number` of them at most, drawn without putting back."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[int] = torch.randperm(samples, generator=generator)[:number].tolist()
    return rows


def shared_out(rows: Sequence[int], size: int, rank: int, ranks: int) -> list[Asked]:
    """As many full batches on every rank; fillers at the end do not count."""
    batches = -(-len(rows) // (size * ranks))
    firsts = [(batch * ranks + rank) * size for batch in range(batches)]
    return [
        Asked([rows[(f + n) % len(rows)] for n in range(size)], min(max(len(rows) - f, 0), size))
        for f in firsts
    ]


def last_linear(model: nn.Module, heads: Sequence[str]) -> nn.Linear | None:
    """The layer that gives logits."""
    found = [
        layer
        for head in heads
        for layer in model.get_submodule(head).modules()
        if isinstance(layer, nn.Linear)
    ]
    return found[-1] if found else None


def first_values(name: str, parameter: Tensor, seed: int) -> Tensor:
    """Of a new head's parameter, before there is a probe: normal for matrices, else zeros."""
    if parameter.ndim < 2:
        return torch.zeros(parameter.shape)
    generator = torch.Generator().manual_seed(seed)
    for letter in name.encode():
        generator.manual_seed((generator.initial_seed() * 257 + letter) % 2**62)
    return torch.randn(parameter.shape, generator=generator) * 0.02


def begin_on(
    training: Training,
    heads: Sequence[str],
    rows: Sequence[int],
    collate: Callable[[Sequence[int]], Batch],
    logits: Callable[[nn.Module, Batch], object],
) -> None:
    """Have the heads' last layer begin as a probe of the samples `rows`. Collective."""
    layer = last_linear(training.model, heads)
    if layer is None:
        return
    asked = shared_out(rows, training.micro_batch_size, training.rank, training.ranks)
    batches = [(collate(one.numbers), one.counted) for one in asked]
    begin_as_probe(
        training.model, layer, batches, lambda batch: logits(training.model, batch), training.device
    )


@torch.no_grad()
def begin_as_probe(
    model: nn.Module,
    layer: nn.Linear,
    batches: Sequence[tuple[Batch, int]],
    forward: Callable[[Batch], object],
    device: torch.device,
) -> bool:
    """Make `layer` the best classifier of what it is given, as the model is now. Collective.

    `batches` are this rank's, with how many of their samples count. Returns whether it was done: a layer
    that classifies every token (as on top of a decoder) is left as it is.
    """
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0].detach().float())

    handle = layer.register_forward_pre_hook(look)
    try:
        with evaluating(model):
            for batch, _ in batches:
                forward({n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()})
    finally:
        handle.remove()
    if any(x.ndim != 2 for x in seen):
        return False
    own = [
        (x_BD[:count].cpu(), batch["labels_B"][:count])
        for x_BD, (batch, count) in zip(seen, batches, strict=True)
    ]
    by_rank = gather_objects(own)
    in_order = [pair for batch in zip(*by_rank, strict=True) for pair in batch]
    probe = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        x_XD, labels_X = (torch.cat(of).to(device) for of in zip(*in_order, strict=True))
        probe = [part.cpu() for part in fit_probe(x_XD, labels_X, layer.out_features)]
    for name, part in zip(("weight", "bias"), broadcast(probe), strict=True):
        if getattr(layer, name) is not None:
            place = layer.get_parameter(name)
            put(place, part.to(place.device, place.dtype))
    return True
