"""What a checkpoint holds of a run: tensors by name, and nothing else.

Moments come from the checkpoint, settings (rates, decay) from the configuration, so that the
optimizer's groups need not be stored.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainer.rng import rng_state, set_rng_state


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, with_rng: bool = True
) -> dict[str, Any]:
    """Model and optimizer by parameter name, and each rank's random state under its own key."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    if with_rng:
        state["rng"] = {f"rank{dist.get_rank()}": rng_state(device)}
    return state


def put_back(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Make what `tensors_of` returned, and a checkpoint has filled, the state of the run."""
    settings = [dict(group) for group in optimizer.param_groups]
    _, present = get_state_dict(model, optimizer)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": present["param_groups"]},
    )
    for group, wanted in zip(optimizer.param_groups, settings, strict=True):
        group.update({k: v for k, v in wanted.items() if k != "params"})
    if "rng" in state:
        set_rng_state(state["rng"][f"rank{dist.get_rank()}"], device)
