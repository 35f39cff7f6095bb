"""Whole tensors of adapters whose parameters are sharded, and back into the shards.

Every rank makes the same calls in the same order: gathering is collective, putting back is not.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.lelora.adapter import Adapter
from parallel.torch_private import local_slices

MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds: the storage itself, which no gradient goes through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole of it, on every rank."""
    whole = tensor.detach()
    if not isinstance(whole, DTensor):
        return whole
    return whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Make this rank's part of `tensor` that of `whole`."""
    here = local(tensor)
    mine = whole[local_slices(tensor)] if isinstance(tensor, DTensor) else whole
    if here.data_ptr() != mine.data_ptr():
        here.copy_(mine)


@torch.no_grad()
def copy_all(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
    """Copy each of `out_of` into its fellow, all of one type at once."""
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensor in zip(into, out_of, strict=True):
        types = place.dtype, tensor.dtype, place.device, tensor.device
        places, tensors = alike.setdefault(types, ([], []))
        places.append(place)
        tensors.append(tensor)
    for places, tensors in alike.values():
        torch._foreach_copy_(places, tensors)


def whole_of(adapter: Adapter) -> dict[str, Tensor]:
    """All tensors of an adapter, whole. Those that are not sharded are the adapter's own."""
    named = (*adapter.named_parameters(), *adapter.named_buffers())
    return {name: gathered(tensor) for name, tensor in named}


def moments_of(adapter: Adapter, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The moments of its parameters, whole; empty before the first step."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in adapter.named_parameters():
        state = optimizer.state.get(parameter, {})
        found[name] = {key: gathered(state[key]) for key in MOMENTS if key in state}
    return found


def put_back(
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    whole: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """The way back from `whole_of` and `moments_of`, once these were changed."""
    for name, tensor in (*adapter.named_parameters(), *adapter.named_buffers()):
        put(tensor, whole[name])
    for name, parameter in adapter.named_parameters():
        for key, value in moments[name].items():
            put(optimizer.state[parameter][key], value)


@torch.no_grad()
def rest(adapter: Adapter, optimizer: torch.optim.Optimizer) -> None:
    """Make rows without a gate 0, and their moments: checkpoints from before this was so differ."""
    idle_R = adapter.get_buffer("gate_R") == 0
    for name, parameter in adapter.named_parameters():
        state = optimizer.state.get(parameter, {})
        for axis, letter in enumerate(name.rpartition("_")[2]):
            if letter == "R":
                shape = [-1 if at == axis else 1 for at in range(parameter.ndim)]
                idle = idle_R.view(shape).expand(parameter.shape)
                here = idle[local_slices(parameter)] if isinstance(parameter, DTensor) else idle
                for tensor in (parameter, *(state[key] for key in MOMENTS if key in state)):
                    local(tensor.detach()).masked_fill_(here, 0.0)


class Snapshot:
    """A copy of all that trains, of its moments, and of the adapters' buffers, as this rank holds them.

    What there is no moment of yet has a copy of zeros, so that tensors and shapes do not change.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.tensors: dict[str, Tensor] = {}
        self.take()

    def _sources(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                found[name] = parameter.detach()
                state = self.optimizer.state.get(parameter, {})
                found |= {f"{key}/{name}": state.get(key) for key in MOMENTS}
                found[f"step/{name}"] = state.get("step")
        for name, buffer in self.model.named_buffers():
            if ".adapter." in f".{name}":
                found[name] = buffer
        return found

    @torch.no_grad()
    def take(self) -> None:
        """Copy what there is now."""
        known: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self._sources().items():
            kept = self.tensors.get(name)
            if tensor is None:
                of = self.tensors[name.partition("/")[2]]
                self.tensors[name] = (
                    torch.zeros(()) if name.startswith("step/") else torch.zeros_like(of)
                )
            elif kept is None or kept.device != tensor.device:
                self.tensors[name] = tensor.detach().clone()
            else:
                known.append((local(kept), local(tensor.detach())))
        copy_all([kept for kept, _ in known], [tensor for _, tensor in known])

    @torch.no_grad()
    def give_back(self) -> None:
        """Make it what there is; identities stay."""
        known = [(name, tensor) for name, tensor in self._sources().items() if tensor is not None]
        copy_all(
            [local(tensor) for _, tensor in known], [local(self.tensors[name]) for name, _ in known]
        )
