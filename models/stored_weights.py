"""Where a transformers checkpoint keeps each tensor of a model.

Most tensors are stored under the model's own name, some under an older name, and some (the experts
of a mixture) in pieces that must be put together. transformers knows which; this is the only file
that asks it through functions that are not public, and a test fails when they change.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

Fetch = Callable[[str], Tensor]
"""Reads a whole stored tensor by its stored name."""
Stored = str | Callable[[Fetch], Tensor]
"""A stored name, of which any slice can be read; or a function that makes the whole tensor."""


def storage_rules(model: nn.Module) -> list[Any]:
    """How checkpoints of the model's class may differ from the model.

    Ask before FSDP2 wraps the model: it changes the class, and the rules go by its name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))  # type: ignore[arg-type]


def locate(model: nn.Module, rules: list[Any], stored: Iterable[str]) -> dict[str, Stored]:
    """For each name in the model's state dict that `stored` covers, where its values are."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    wanted = model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = str(model.base_model_prefix)
    found: dict[str, Stored] = {}
    pieces: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted:  # the name may be right as it is, but for the prefix
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted and pattern is None:
            found[target] = name
        elif target in wanted and pattern is not None:
            pieces.setdefault(target, []).append((name, pattern))
    for target, parts in pieces.items():
        converter = by_pattern[parts[0][1]]
        found[target] = partial(_convert, model, target, converter, parts)
    return found


def stored_form(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of the model under the names, and in the pieces, that checkpoints keep them in.

    The way back from `locate`. Tensors that are stored together (the experts of a layer) must come
    together. The model must not be wrapped: the rules go by its class.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stored = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    return {str(name): tensor for name, tensor in stored.items()}


def stays_fp32(model: nn.Module, name: str) -> bool:
    """Whether the architecture keeps a tensor in fp32 whatever the type of the others."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in kept for part in name.split("."))


def _convert(
    model: nn.Module, target: str, converter: Any, parts: list[tuple[str, str]], fetch: Fetch
) -> Tensor:
    """Put the stored pieces of one tensor together."""
    own = deepcopy(converter)
    for name, pattern in parts:
        own.add_tensor(target, name, pattern, partial(fetch, name))
    made: Mapping[str, Any] = own.convert(target, model=model, config=model.config)
    value = made[target]
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, Tensor)
    return tensor
