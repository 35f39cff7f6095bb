"""What a checkpoint holds of a run: tensors by name, and nothing else.

Parameters that do not train are left out: a run that is resumed has made or loaded them again already.

Moments come from the checkpoint, settings (rates, decay) from the configuration, so that the
optimizer's groups need not be stored.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from trainer.rng import rng_state, set_rng_state

KEPT = StateDictOptions(ignore_frozen_params=True, strict=False)


def tensors_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    with_rng: bool = True,
    steering: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Model and optimizer by parameter name, and each rank's random state under its own key.

    `steering` is what the task keeps besides (`recipes.abilities.Steering`).
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=KEPT)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    if steering:
        state["steering"] = steering
    if with_rng:
        state["rng"] = {f"rank{dist.get_rank()}": rng_state(device)}
    return state


def kept_of(model: nn.Module) -> dict[str, Tensor]:
    """The part of a whole model's state dict that checkpoints hold."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) not in frozen}


def put_back(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Make what `tensors_of` returned, and a checkpoint has filled, the state of the run."""
    settings = [dict(group) for group in optimizer.param_groups]
    _, present = get_state_dict(model, optimizer, options=KEPT)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": present["param_groups"]},
        options=KEPT,
    )
    for group, wanted in zip(optimizer.param_groups, settings, strict=True):
        group.update({k: v for k, v in wanted.items() if k != "params"})
    if "rng" in state:
        set_rng_state(state["rng"][f"rank{dist.get_rank()}"], device)
