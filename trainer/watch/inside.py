"""Inside the model, every `logging.statistics` steps: gradients by parameter, activations by block.

    norm     2-norm of the whole tensor, over all ranks
    rms      root of the mean square of what a block gives on, over all micro-batches and ranks
    max      largest magnitude
    broken   elements that are not finite; of activations, their share

Hooks are there for the step that is looked at, and for no other. Collective; a report of a step that is
looked at waits for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.norm import copies

Row = dict[str, Any]


class Inside:
    """Looks at one step in `every`; 0: at none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._looking = False
        self._activations: dict[str, Tensor] = {}
        self._row: Row = {}

    @contextmanager
    def step(self, number: int, model: nn.Module) -> Iterator[None]:
        """This step is the one with this number."""
        self._looking = self._every > 0 and number % self._every == 0
        if not self._looking:
            yield
            return
        self._row = {"kind": "statistics", "step": number}
        device = next(model.parameters()).device
        found = blocks(model)
        self._activations = {n: torch.zeros(4, dtype=torch.float64, device=device) for n in found}
        hooks = [
            module.register_forward_hook(partial(self._note, name))
            for name, module in found.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._row["activations"] = self._activation_figures()

    def gradients(self, model: nn.Module) -> None:
        """The backward pass is done, and nothing is clipped yet."""
        if self._looking:
            trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
            self._row["gradients"] = _figures({n: p.grad for n, p in trained.items()})
            self._row["weights"] = _figures({n: p.detach() for n, p in trained.items()})

    def read(self) -> Row:
        """The row on the step just done, if it was looked at; else an empty one."""
        row, self._row = self._row, {}
        return row

    @torch.no_grad()
    def _note(self, name: str, _module: nn.Module, _given: Any, result: Any) -> None:
        """A block has given `result` on; again where it is recomputed, which changes no mean."""
        if (found := _first_tensor(result)) is not None:
            self._activations[name] = _joined(self._activations[name], _sums(found))

    def _activation_figures(self) -> Row:
        whole = _over_ranks(torch.stack(list(self._activations.values()))).tolist()
        return {
            name: {"rms": (square / count) ** 0.5, "max": most, "broken": broken / count}
            for name, (square, broken, count, most) in zip(self._activations, whole, strict=True)
            if count
        }


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Elements of module lists, and outside of them whatever has parameters of its own, by name."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            inner = isinstance(module, nn.ModuleList)
            own = next(child.parameters(recurse=False), None) is not None
            if inner or own:
                found[f"{prefix}{name}"] = child
            if not inner:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return found


@torch.no_grad()
def _figures(tensors: dict[str, Any]) -> Row:
    """Norm, largest magnitude and broken elements of tensors that ranks share."""
    if not tensors:
        return {}
    world_size, rows = dist.get_world_size(), []
    for tensor in tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sums = _sums(local)
        sums[:3] /= copies(tensor, world_size)
        rows.append(sums)
    whole = _over_ranks(torch.stack(rows)).tolist()
    return {
        name: {"norm": square**0.5, "max": most, "broken": round(broken)}
        for name, (square, broken, _count, most) in zip(tensors, whole, strict=True)
    }


def _sums(tensor: Tensor) -> Tensor:
    """Sum of squares, broken elements, elements, and the largest magnitude; the first and last of
    those that are finite."""
    finite = torch.isfinite(tensor)
    kept = torch.where(finite, tensor, 0)
    most = kept.abs().max().double() if tensor.numel() else torch.zeros((), dtype=torch.float64)
    count = torch.tensor(tensor.numel(), dtype=torch.float64)
    square = torch.linalg.vector_norm(kept, dtype=torch.float32).double().square()
    parts = (square, (~finite).sum().double(), count, most)
    return torch.stack([part.to(tensor.device) for part in parts])


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one[:3] + other[:3], torch.maximum(one[3:], other[3:])])


def _over_ranks(rows_N4: Tensor) -> Tensor:
    sums, most = rows_N4[:, :3].contiguous(), rows_N4[:, 3].contiguous()
    dist.all_reduce(sums)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return torch.cat([sums, most[:, None]], dim=1)


def _first_tensor(result: Any) -> Tensor | None:
    """What a block gives on: the first tensor of floating point in its result."""
    if isinstance(result, Tensor):
        return result.detach() if result.is_floating_point() else None
    if hasattr(result, "values") and callable(result.values):  # transformers' outputs
        result = tuple(result.values())
    if isinstance(result, tuple | list):
        return next((t for part in result if (t := _first_tensor(part)) is not None), None)
    return None
