"""What was learnt, as an ordinary LoRA folder of `peft` for the untouched base model.

    M outputs, N inputs, r rows

Every matrix gets the same rank, and the scale is 1 (`lora_alpha` = `r`): what a matrix was scaled by is
in its factors. So the folder means the same to every reader, to those that know one rank and one alpha
for all matrices (vLLM) as to `peft`. A matrix without an update gets factors of zeros: some readers do
not take rank 0, and others do not take a missing one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.lelora.fold import Folded, compress
from models.lelora.inject import Target

PREFIX = "base_model.model."
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that servers have kernels for; a larger one is written as it is."""

Update = Callable[[Target], tuple[Tensor, Tensor]]
"""Left (M, r) and right (r, N) factors of what was added to a target's weight."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    rank: int
    needed: int
    """The rank of the largest update."""
    error: float
    """Frobenius norm of what truncation dropped, as a share of all updates together."""
    worst: str
    """The matrix that lost most of its own update, and how much."""

    def words(self) -> str:
        """For the console."""
        text = f"rank {self.rank} ({self.needed} needed), scale 1"
        if self.error:
            text += f", truncated: {self.error:.2e} of the update is lost, most in {self.worst}"
        if self.rank > 16:
            text += f"; vLLM needs --max-lora-rank {self.rank}"
        return text


def write_adapter(
    out: Path,
    targets: Sequence[Target],
    update: Update,
    rank: int | None,
    base: str | None,
    task_type: str,
    saved: Mapping[str, Tensor],
    linear_names: Sequence[str],
    dtype: torch.dtype = torch.float32,
) -> Exported:
    """Write `adapter_model.safetensors` and `adapter_config.json` to the existing folder `out`.

    `rank` None keeps every update as it is; a number truncates to it. `saved` are tensors that were
    trained whole (a classifier's head), by their names in the model; `linear_names` are all layers
    that a short name in the configuration could mean. Raises `ValueError` for an update that is not
    finite, and where nothing was changed.
    """
    found = {target.name: compress(*update(target), rank or 10**9) for target in targets}
    if not any(folded.rank for folded in found.values()):
        raise ValueError("the adapter changes nothing: no row has trained")
    needed = max(folded.rank for folded in found.values())
    width = rank or next((size for size in RANKS if size >= needed), needed)
    tensors: dict[str, Tensor] = {}
    for target in targets:
        folded = found[target.name]
        a_rN = torch.zeros(width, target.shape.inputs)
        b_Mr = torch.zeros(target.shape.outputs, width)
        a_rN[: folded.rank] = folded.right_CN.float().cpu()
        b_Mr[:, : folded.rank] = folded.left_MC.float().cpu()
        tensors[f"{PREFIX}{target.name}.lora_A.weight"] = a_rN.to(dtype)
        tensors[f"{PREFIX}{target.name}.lora_B.weight"] = b_Mr.to(dtype)
    for name, tensor in saved.items():
        tensors[f"{PREFIX}{name}"] = tensor.detach().cpu().to(dtype).contiguous()
    check_tensors(tensors)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = _config(targets, width, base, task_type, saved, linear_names)
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Exported(width, needed, *_errors(found))


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for what a reader would take without a word and be wrong about."""
    for name, tensor in tensors.items():
        if ".lora_" in name and (tensor.ndim != 2 or tensor.numel() == 0):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, where a matrix is needed")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} is not finite: export an earlier checkpoint with --step")


def _errors(found: Mapping[str, Folded]) -> tuple[float, str]:
    """What truncation lost of all updates, and the matrix that lost most of its own."""
    lost = {name: folded.discarded for name, folded in found.items()}
    kept = {  # the components are orthogonal, each with a left and a right part
        name: float((f.left_MC.norm(dim=0) * f.right_CN.norm(dim=1)).norm())
        for name, f in found.items()
    }
    whole = {name: kept[name] / max(1 - lost[name] ** 2, 1e-30) ** 0.5 for name in found}
    total = sum(norm**2 for norm in whole.values()) ** 0.5
    error = sum((lost[name] * whole[name]) ** 2 for name in found) ** 0.5 / max(total, 1e-30)
    worst = max(lost, key=lambda name: lost[name])
    return error, f"{worst} ({lost[worst]:.1%})"


def _config(
    targets: Sequence[Target],
    rank: int,
    base: str | None,
    task_type: str,
    saved: Mapping[str, Tensor],
    linear_names: Sequence[str],
) -> dict[str, Any]:
    whole = {target.name for target in targets}
    short = {name.rpartition(".")[2] for name in whole}
    meant = {name for name in linear_names if name.rpartition(".")[2] in short}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "fan_in_fan_out": any(target.transposed for target in targets),
        "target_modules": sorted(short if meant == whole else whole),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
    }


def merge(weight: Tensor, target: Target, update: Update) -> Tensor:
    """The stored weight with the update in it, in fp32: cast it once, afterwards."""
    left, right = update(target)
    summed = target.oriented(weight).double() + left.to(weight.device) @ right.to(weight.device)
    return target.oriented(summed.float()).contiguous()
