"""What a model with adapters exports: a LoRA folder, or whole weights with the adapter in them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.hf_folder import Read, add_weight_arguments
from models.lelora.adapter import Adapter, factors
from models.lelora.inject import Target
from models.lelora.peft_folder import merge, write_adapter
from recipes.lelora import baselines
from recipes.lelora.adapted import Adapted
from recipes.task import Task


def export_arguments(parser: ArgumentParser) -> None:
    """Adapter or merged weights."""
    add_weight_arguments(parser)
    parser.set_defaults(dtype=None)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--adapter", action="store_true", help="a LoRA folder of peft (default)")
    which.add_argument("--merge", action="store_true", help="whole weights, the adapter in them")
    parser.add_argument(
        "--rank", type=int, help="truncate the adapter to this rank (default: exact)"
    )


def writes_adapter(adapted: Adapted, options: Namespace) -> bool:
    """Whether the adapter is to be written; sets the type of what is not given."""
    adapter = (adapted.has_adapters or adapted.is_peft) and not options.merge
    if options.dtype is None:
        options.dtype = "float32" if adapter else "bfloat16"
    return adapter


def _update(adapted: Adapted, read: Read) -> Callable[[Target], tuple[Tensor, Tensor]]:
    if adapted.is_peft:
        return _peft_update(adapted, read)

    def update(target: Target) -> tuple[Tensor, Tensor]:
        with torch.device("meta"):  # for its names
            like = Adapter(adapted.config.param, target.shape.outputs, target.shape.inputs, 1, 1)
        names = {name: f"{target.adapter}.{name}" for name in like.state_dict()}
        found = read(list(names.values()))
        return factors(adapted.config.param, {own: found[name] for own, name in names.items()})

    return update


def _peft_update(adapted: Adapted, read: Read) -> Callable[[Target], tuple[Tensor, Tensor]]:
    if adapted.config.method not in baselines.EXPORTED:
        raise ValueError(
            f"lelora.method={adapted.config.method} is here to be compared with: only lelora and its "
            f"ablations, {', '.join(baselines.EXPORTED)}, milora, loraxs, full and head are exported"
        )

    def update(target: Target) -> tuple[Tensor, Tensor]:
        names = [f"{target.name}.lora_{letter}.default.weight" for letter in "AB"]
        found = read(names)
        scale = baselines.scaling(adapted.config)
        return scale * found[names[1]].double(), found[names[0]].double()

    return update


def export_adapter(
    adapted: Adapted, model: nn.Module, read: Read, out: Path, options: Namespace, base: str | None
) -> str:
    """Write a LoRA folder; returns what was written. Raises `ValueError`."""
    if base is None:
        raise ValueError(
            "the base model has random weights, which no folder has: export with --merge, or train "
            "with model.path"
        )
    saved = {
        name: tensor
        for head in adapted.heads
        for name, tensor in read(
            [f"{head}.{n}" for n in model.get_submodule(head).state_dict()]
        ).items()
    }
    done = write_adapter(
        out, adapted.targets, _update(adapted, read), options.rank, base, adapted.task_type, saved,
        adapted.linear, getattr(torch, options.dtype),
    )  # fmt: skip
    return f"LoRA, {done.words()}; check it with: python -m models.lelora.verify {base} OUT"


def merged(
    adapted: Adapted,
    task: Task,
    base: nn.Module,
    read: Read,
    locate: Callable[[Any], Mapping[str, Any]],
) -> Read:
    """A reader of whole weights with the adapter in them; `base` is the model without any, on meta.

    Holds the base model in memory. Trained heads come from the checkpoint.
    """
    whole = adapted.whole_base(task, base, locate).state_dict()
    targets = {f"{target.name}.weight": target for target in adapted.targets}
    update = _update(adapted, read)

    def merged_read(names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            if any(name.startswith(f"{head}.") for head in adapted.heads):
                found |= read([name])
            elif name in targets:
                found[name] = merge(whole[name], targets[name], update)
            else:
                found[name] = whole[name]
        return found

    return merged_read
