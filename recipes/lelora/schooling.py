"""What a population's runs begin from and see: copies of one model, and samples in turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.lelora.shards import gathered
from recipes.task import Batch, Samples


def copies(
    whole: nn.Module,
    heads: Mapping[str, Tensor],
    build: Callable[[], nn.Module],
    device: torch.device,
) -> Callable[[], nn.Module]:
    """Makes models on `device` with the values of `whole`, and of the heads as they are. Collective.

    `build` gives one without values; `heads` are parameters by their names, sharded or not.
    """
    kept = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    kept |= {name: gathered(parameter).cpu() for name, parameter in heads.items()}

    def fresh() -> nn.Module:
        model = build().to_empty(device=device)
        model.load_state_dict(kept)
        for name, buffer in whole.named_buffers():
            model.get_buffer(name).copy_(buffer)
        return model.eval()

    return fresh


def in_turn(
    samples: Samples, size: int, collate: Callable[[Sequence[Any]], Batch]
) -> Callable[[Sequence[int]], Batch]:
    """Gives the batches of numbers as one: samples in order, from the first again after the last."""
    return lambda numbers: collate(
        [samples[(number * size + n) % len(samples)] for number in numbers for n in range(size)]
    )
