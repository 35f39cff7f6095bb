"""Adapters beside any linear layers of a model, chosen by name."""

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.lelora.adapter import Adapter
from models.lelora.budget import Shape

ALL = "all-linear"
TYPES = {
    "q": ("q_proj", "query", "q_lin", "wq", "q"),
    "k": ("k_proj", "key", "k_lin", "wk", "k"),
    "v": ("v_proj", "value", "v_lin", "wv", "v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "qkv", "in_proj", "Wqkv"),
    "o": ("o_proj", "out_proj", "out_lin", "attention.output.dense", "attn.c_proj", "attention.dense",
          "wo", "o"),
    "gate": ("gate_proj", "gate_up_proj", "w1", "wi_0"),
    "up": ("up_proj", "w3", "wi_1"),
    "down": ("down_proj", "w2"),
    "fc1": ("fc1", "intermediate.dense", "c_fc", "lin1", "dense_h_to_4h", "wi"),
    "fc2": ("fc2", "output.dense", "mlp.c_proj", "lin2", "dense_4h_to_h"),
}  # fmt: skip
"""What architectures call the same matrix."""


@dataclass(frozen=True)
class Target:
    """A linear layer that has an adapter."""

    name: str
    """Of the layer, in the model."""
    shape: Shape
    transposed: bool
    """The weight is stored as (N, M): GPT-2's `Conv1D`."""
    layer: int | None
    """The first number in the name."""
    kind: str
    """What the matrix is for: one of `TYPES`, or other."""

    @property
    def adapter(self) -> str:
        """Name of the adapter, in the model."""
        return f"{self.name}.adapter"

    def oriented(self, weight: Tensor) -> Tensor:
        """The weight as (M, N), whichever way it is stored; its own inverse."""
        return weight.T if self.transposed else weight


def is_linear(module: nn.Module) -> bool:
    """Whether an adapter can stand beside `module`."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def find_targets(model: nn.Module, wanted: Sequence[str], exclude: Sequence[str]) -> list[Target]:
    """The linear layers that `wanted` names and `exclude` does not, in the model's order.

    An entry is a layer's name or the end of one (`q_proj`), a glob (`*.layers.[0-3].*`), or
    `all-linear`: every linear layer but those that make the output. Raises `ValueError` for an entry
    that names none, for a weight that is an embedding's, too, and for one that is quantised.
    """
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    outputs = _outputs(model)
    found: dict[str, nn.Module] = {}
    for entry in wanted:
        named = [n for n in linear if _names(entry, n) and not (entry == ALL and n in outputs)]
        if not named:
            raise ValueError(_nothing("lelora.targets", entry, linear, model))
        found |= {name: linear[name] for name in named}
    for entry in exclude:
        named = [name for name in linear if _names(entry, name)]
        if not named:
            raise ValueError(_nothing("lelora.exclude", entry, linear, model))
        found = {name: module for name, module in found.items() if name not in named}
    if not found:
        raise ValueError(
            f"lelora.exclude={list(exclude)} leaves none of the layers that lelora.targets="
            f"{list(wanted)} names: set lelora.exclude to less"
        )
    _refuse_shared(model, found)
    return [_target(name, found[name]) for name in linear if name in found]


def refuse_rank(targets: Sequence[Target], rank: int) -> None:
    """Raise `ValueError` for a rank that no matrix has; smaller matrices get what they have."""
    most = max(target.shape.components for target in targets)
    if rank > most:
        raise ValueError(
            f"lelora.rank={rank} is more than the {most} components of the largest matrix: set "
            f"lelora.rank to {most} or less"
        )


def inject(
    model: nn.Module, targets: Sequence[Target], kind: str, rows: int, fold_rows: int
) -> None:
    """Freeze `model` and put an adapter, without any row yet, beside each of `targets`.

    A matrix with fewer than `rows` components gets that many. What shall train besides is the
    caller's to unfreeze.
    """
    model.requires_grad_(False)
    for target in targets:
        layer = model.get_submodule(target.name)
        fitting = min(rows, target.shape.components)
        layer.adapter = Adapter(kind, target.shape.outputs, target.shape.inputs, fitting, fold_rows)
        layer.register_forward_hook(_add)


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter = layer.adapter
    assert isinstance(adapter, Adapter)
    found: Tensor = adapter(inputs[0], output)
    return found


def adapters_of(model: nn.Module, targets: Sequence[Target]) -> dict[str, Adapter]:
    """Each target's adapter, by the target's name."""
    found = {}
    for target in targets:
        adapter = model.get_submodule(target.adapter)
        assert isinstance(adapter, Adapter)
        found[target.name] = adapter
    return found


def refresh(adapter: Adapter, horizon: float) -> None:
    """After a switch or loading: what an adapter knows on the host follows from its tensors again.

    `horizon` is the age at which a row is as good as old (`models.lelora.row_steps`).
    """
    tensors = dict(adapter.named_buffers())
    adapter.gain = float(tensors["scale"])
    adapter.folded = bool((tensors["fold_b_MC"] != 0).any())
    ages = tensors["age_R"][tensors["components_R"] >= 0]
    adapter.young_steps = max(int(horizon - float(ages.min())), 0) if len(ages) else 0
    adapter.has_younger = None


def _target(name: str, module: nn.Module) -> Target:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_floating_point() or weight.ndim != 2:
        raise ValueError(
            f"{name} has a weight of type {weight.dtype} and shape {tuple(weight.shape)}, not a matrix "
            "of floating-point numbers: load the base model unquantised, or add it to lelora.exclude"
        )
    transposed = not isinstance(module, nn.Linear)
    rows, columns = weight.shape
    shape = Shape(columns, rows) if transposed else Shape(rows, columns)
    number = re.search(r"\.(\d+)\.", name)
    return Target(name, shape, transposed, int(number[1]) if number else None, matrix_kind(name))


def matrix_kind(name: str) -> str:
    """What a layer of this name is for: the longest name of `TYPES` that it ends with."""
    matching = [
        (len(end), kind)
        for kind, ends in TYPES.items()
        for end in ends
        if name == end or name.endswith(f".{end}")
    ]
    return max(matching)[1] if matching else "other"


def _names(entry: str, name: str) -> bool:
    if entry == ALL or name == entry or name.endswith(f".{entry}"):
        return True
    return any(letter in entry for letter in "*?[") and fnmatch.fnmatchcase(name, entry)


def _outputs(model: nn.Module) -> set[str]:
    """Names of the layers that make the output: what `all-linear` leaves out."""
    getter = getattr(model, "get_output_embeddings", None)
    output = getter() if callable(getter) else None
    heads = [getattr(model, name, None) for name in ("classifier", "score")]
    inner = [m for head in heads if isinstance(head, nn.Module) for m in head.modules()]
    return {n for n, m in model.named_modules() if m is output or any(m is head for head in inner)}


def _nothing(key: str, entry: str, linear: Mapping[str, nn.Module], model: nn.Module) -> str:
    stacked = [n for n, p in model.named_parameters() if p.ndim > 2 and _names(entry, n)]
    stacked += [
        n for n, m in model.named_modules()
        if _names(entry, n) and any(p.ndim > 2 for p in m.parameters(recurse=False))
    ]  # fmt: skip
    if stacked:
        return (
            f"{key}: {entry} names {stacked[0]}, whose experts are one stack of matrices, which cannot "
            f"have adapters: set {key} to linear layers"
        )
    ends = sorted({name.rpartition(".")[2] for name in linear})
    near = difflib.get_close_matches(entry, ends, n=1)
    hint = f"set {key} to {near[0]}" if near else f"set {key} to some of them"
    return (
        f"{key}: {entry} names no linear layer; there are {', '.join(ends[:12]) or 'none'}: {hint}"
    )


def _refuse_shared(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    """A weight that another module reads, too, would be one thing in training and another merged."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, module in found.items():
        others = [other for other in owners[id(module.weight)] if other != name]
        if others:
            raise ValueError(
                f"{name} shares its weight with {others[0]} (tied embeddings): merging would change "
                f"both. Add {name} to lelora.exclude, or set model.tie_embeddings=false"
            )
