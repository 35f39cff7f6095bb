"""Other methods in the same recipe, from `peft` where it has them.

The layers are peft's own, put in while the model is on the meta device. Their first weights are what
peft gives to each layer by itself: rank 0 makes it from the whole weight, and all ranks keep their
part. What peft changes in the base weight (PiSSA), it changes here, too. A resumed run begins the same
way, and then has what trained put back.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collectives.host import broadcast
from models.lelora.inject import Target
from recipes.lelora.adalora import adalora_settings
from recipes.lelora.config import LeloraConfig
from recipes.lelora.ranks import this_rank
from recipes.lelora.shards import gathered, put

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "mica": {"init_lora_weights": "mica"},
    "olora": {"init_lora_weights": "olora"},
    "eva": {},  # and then `recipes.lelora.activations`
}
"""What makes a method of peft's LoRA."""
EXPORTED = ("lora", "rslora", "eva")
"""Those whose update is a product of what trains, and nothing else."""

UNKNOWN_STEPS = 1000
"""Layers do not depend on how long a run is."""


def settings(config: LeloraConfig, names: Sequence[str]) -> Any:
    """peft's configuration for layers of these names. Raises `ValueError` if peft is missing."""
    try:
        from peft import LoraConfig

        if config.method == "adalora":
            return adalora_settings(config, names, UNKNOWN_STEPS)
    except ImportError as error:
        raise ValueError(
            f"lelora.method={config.method} needs the package peft: pip install 'springtide[lelora]'"
        ) from error
    return LoraConfig(
        r=config.rank,
        lora_alpha=alpha(config),  # type: ignore[arg-type]
        target_modules=list(names),
        **SETTINGS[config.method],
    )


def alpha(config: LeloraConfig) -> float:
    """LoRA's alpha."""
    return 2.0 * config.rank if config.alpha is None else config.alpha


def scaling(config: LeloraConfig) -> float:
    """What the product of the factors is multiplied by."""
    rank = config.rank**0.5 if config.method == "rslora" else config.rank
    return alpha(config) / rank


def inject_baseline(model: nn.Module, targets: Sequence[Target], config: LeloraConfig) -> None:
    """Put peft's layers in; what trains is what peft says."""
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    names = [target.name for target in targets]
    inject_adapter_in_model(settings(config, names), model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if ".ranknum." in name:  # a number that AdaLoRA keeps as a parameter
            parameter.requires_grad_(False)


@torch.no_grad()
def fill(model: nn.Module, targets: Sequence[Target], config: LeloraConfig, seed: int) -> None:
    """Give every layer of a sharded model the weights that peft begins with. Collective."""
    for target in targets:
        layer = model.get_submodule(target.name)
        whole = gathered(layer.get_parameter("base_layer.weight"))
        made: dict[str, Tensor] = {}
        if this_rank() == 0:
            made = _first(whole.float().cpu(), target, config, seed)
        made = broadcast(made)
        for name, tensor in made.items():
            place = layer.get_parameter(name)
            put(place, tensor.to(place.device))


def _first(weight: Tensor, target: Target, config: LeloraConfig, seed: int) -> dict[str, Tensor]:
    """What peft makes of one layer."""
    from peft import inject_adapter_in_model

    base: nn.Module
    if target.transposed:
        from transformers.pytorch_utils import Conv1D

        base = Conv1D(target.shape.outputs, target.shape.inputs)
    else:
        base = nn.Linear(target.shape.inputs, target.shape.outputs, bias=False)
    with torch.no_grad():
        base.get_parameter("weight").copy_(weight)
    alone = nn.ModuleDict({"layer": base})
    digest = hashlib.blake2b(f"{seed}/{target.name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(int.from_bytes(digest, "big"))
        inject_adapter_in_model(settings(config, ["layer"]), alone)
    found = dict(alone.get_submodule("layer").named_parameters())
    return {name: t.detach().clone() for name, t in found.items() if not name.endswith("bias")}


def stored_names(targets: Sequence[Target]) -> dict[str, str]:
    """A base tensor's name in the model with peft's layers, by its own."""
    return {
        f"{target.name}.{part}": f"{target.name}.base_layer.{part}"
        for target in targets
        for part in ("weight", "bias")
    }
