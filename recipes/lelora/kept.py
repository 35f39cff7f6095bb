"""What a checkpoint holds of steering, so that a run that is resumed goes on bit for bit."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.lelora.brain import Setting
from recipes.lelora.shards import local

if TYPE_CHECKING:
    from recipes.lelora.steering import LeloraSteering

HALF = 2**32
"""A checksum of 64 bits is two numbers that fp64 holds exactly."""


def state_of(steering: "LeloraSteering") -> dict[str, Tensor]:
    """Tensors whose names and shapes do not change in a run. Collective."""
    seen, actions, logs = steering.pending
    base = steering.adapters.spectra.base
    numbers = [
        steering.last_step, steering.bad, steering.loss, steering.first_loss, steering.drop,
        steering.has_pending, base // HALF, base % HALF,
    ]  # fmt: skip
    found = {f"brain/{name}": tensor for name, tensor in steering.brain.state().items()}
    found |= {f"begin/{name}": tensor.clone() for name, tensor in steering.begin.items()}
    found |= {f"good/{name}": tensor.clone() for name, tensor in steering.good.tensors.items()}
    if steering.path is not None:
        found |= {f"path/{name}": tensor for name, tensor in steering.path.state().items()}
    return found | {
        "ages": steering.adapters.ages_M.clone(), "moved": steering.adapters.moved_M.clone(),
        "credit": steering.credit_M.clone(), "gradient": steering.gradient_M.clone(),
        "seen": seen.clone(), "actions": actions.clone(), "log_prob": logs.clone(),
        "now": steering.adapters.setting.tensor(), "good_setting": steering.good_setting.tensor(),
        "numbers": torch.tensor([float(number) for number in numbers], dtype=torch.float64),
    }  # fmt: skip


@torch.no_grad()
def load(steering: "LeloraSteering", state: Mapping[str, Tensor]) -> None:
    """Go on from what `state_of` returned. Raises `ValueError` for another base model."""
    numbers = state["numbers"].tolist()
    if int(numbers[6]) * HALF + int(numbers[7]) != steering.adapters.spectra.base:
        raise ValueError(
            "its adapters belong to another base model: set model.* (and trainer.seed, where "
            "weights are random) as in its config.yaml"
        )
    steering.last_step, steering.bad = int(numbers[0]), int(numbers[1])
    steering.loss, steering.first_loss, steering.drop = numbers[2:5]
    steering.has_pending = numbers[5] > 0
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        part, slash, rest = name.partition("/")
        parts.setdefault(part if slash else "", {})[rest if slash else name] = tensor
    steering.brain.load(parts["brain"])
    own = parts[""]
    steering.adapters.ages_M, steering.adapters.moved_M = own["ages"].clone(), own["moved"].clone()
    steering.credit_M, steering.gradient_M = own["credit"].clone(), own["gradient"].clone()
    steering.pending = (own["seen"].clone(), own["actions"].clone(), own["log_prob"].clone())
    steering.good_setting = Setting.of(own["good_setting"])
    for copies, part in ((steering.begin, "begin"), (steering.good.tensors, "good")):
        for name, tensor in parts[part].items():
            local(copies[name]).copy_(local(tensor))
    if steering.path is not None:
        steering.path.load(parts["path"])
    steering.adapters.go_on(Setting.of(own["now"]))
    steering.journal.open(steering.last_step)
