"""The seam between FSDP2 and TIDE: the only file that touches FSDP2's private names.

FSDP2 keeps all of its state machine, hooks, prefetching and gradient logic. Three functions that its
parameter groups call are dispatched on the object that does the group's communication:

- `foreach_all_gather`: a group that uses TIDE writes its shards into its slot instead;
- `foreach_all_gather_copy_out`: has nothing to copy, and waits for the peers' shards;
- `foreach_reduce_scatter_copy_in`: packs nothing, and hands the gradients to the reduce-scatter.

Groups that TIDE cannot serve stay on torch's collectives; `use_tide` says which, and why.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _groups

from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import Transport
from collectives.tide.all_gather import start_all_gather
from collectives.tide.reduce_scatter import ReduceScatter
from collectives.tide.slots import Layout, Slot, make_layout

_fsdp_collectives: Any = _collectives
_fsdp_param_group: Any = _groups

EXPECTED = {
    "foreach_all_gather": [
        "fsdp_params", "group", "async_op", "all_gather_copy_in_stream", "all_gather_stream",
        "device", "all_gather_comm",
    ],
    "foreach_all_gather_copy_out": ["all_gather_result", "fsdp_params", "group"],
    "foreach_reduce_scatter_copy_in": ["unsharded_grads", "reduce_scatter_input", "world_size"],
}  # fmt: skip
"""What the dispatched functions take, in torch 2.11 to 2.13."""


@dataclass
class Tide:
    """What the layers of one model share on one process group."""

    process_group: dist.ProcessGroup
    num_slots: int
    chunk: int
    timeout: float
    poison: bool
    layers: list["TideLayer"] = field(default_factory=list)
    transport: Transport | None = None
    reduce: ReduceScatter | None = None

    def build(self) -> None:
        """Allocate slots and staging, once; every rank comes here in its first all-gather.

        Layers that give their parameters back after the forward pass take turns in `num_slots`
        slots, each as large as the largest of them; the others have one of their own.
        """
        self.transport = SharedMemory(self.process_group, self.timeout)
        for layer in self.layers:
            layer.measure(self.transport.world_size)
        rotating = [layer for layer in self.layers if layer.reshards]
        size = max((layer.layout.nbytes for layer in rotating), default=0)
        shared = [self._slot(n, size) for n in range(min(self.num_slots, len(rotating)))]
        for number, layer in enumerate(rotating):
            layer.enter(shared[number % len(shared)])
        private = [layer for layer in self.layers if not layer.reshards]
        for number, layer in enumerate(private, start=len(shared)):
            layer.enter(self._slot(number, layer.layout.nbytes))
        channels = 2 * (len(shared) + len(private))
        self.reduce = ReduceScatter(self.transport, self.chunk, channels)

    def _slot(self, index: int, nbytes: int) -> Slot:
        assert self.transport is not None
        return Slot(self.transport, self.transport.allocate(nbytes), index, poison=self.poison)


class TideLayer:
    """One FSDP2 parameter group on TIDE; FSDP2 takes it for both of the group's communicators."""

    layout: Layout
    slot: Slot
    gathered: list[Tensor]

    def __init__(self, tide: Tide, group: Any, name: str) -> None:
        self.tide, self.group, self.name = tide, group, name
        self.placeholder: Tensor | None = None
        self.grads: list[Tensor] = []
        self.freed = 0

    # All-gather

    @property
    def reshards(self) -> bool:
        """Whether parameters are given back after the forward pass; FSDP2 decides at its start."""
        return self.group.post_forward_mesh_info is not None

    def measure(self, world_size: int) -> None:
        """Lay the group's parameters out; their dtypes are known after FSDP2's lazy start."""
        shards = [
            (p._sharded_param_data.numel(), p.param_dtype or p.orig_dtype)
            for p in self.group.fsdp_params
        ]
        self.layout = make_layout(world_size, shards)

    def enter(self, slot: Slot) -> None:
        """Make the slot's memory the storage of the group's gathered parameters, for good."""
        self.slot, self.gathered = slot, slot.tensors(self.layout)
        for param, whole in zip(self.group.fsdp_params, self.gathered, strict=True):
            param.all_gather_outputs = [whole]
            param.alloc_all_gather_outputs = lambda: None
            param.free_unsharded_param = self._free

    def _free(self) -> None:
        """FSDP2 gives one parameter back; the slot is free when all of the group are."""
        self.freed += 1
        if self.freed == len(self.group.fsdp_params):
            self.freed = 0
            self.slot.release()

    def start(self) -> None:
        """Write this rank's shards to all peers."""
        if self.tide.transport is None:
            self.tide.build()
        shards = [param._sharded_param_data for param in self.group.fsdp_params]
        start_all_gather(self.slot, self.layout, shards, self.name)

    # Reduce-scatter, in the shape of FSDP2's `ReduceScatter`: it allocates an input, has it packed,
    # allocates an output, and calls. The input here is a placeholder without memory.

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First the placeholder for the packed gradients, then the real output."""
        if self.placeholder is None:
            self.placeholder = torch.empty(1, dtype=dtype, device=device).expand(*size)
            self.placeholder.tide_layer = self  # type: ignore[attr-defined]
            return self.placeholder
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients that `foreach_reduce_scatter_copy_in` handed over."""
        del async_op
        assert self.tide.reduce is not None
        assert input_tensor is self.placeholder
        world_size = dist.get_world_size(group)
        shard_numels = [_padded_shard(grad, world_size) for grad in self.grads]
        self.tide.reduce(self.grads, shard_numels, output_tensor, self._divisor(op, world_size))
        self.placeholder, self.grads = None, []

    def _divisor(self, op: Any, world_size: int) -> float:
        if op == dist.ReduceOp.AVG:
            return float(world_size)
        if op == dist.ReduceOp.SUM:
            return 1.0
        return float(self.group.gradient_divide_factor)


def _padded_shard(grad: Tensor, world_size: int) -> int:
    """Elements of a gradient's shard, as FSDP2 pads it along the first dimension."""
    rows = -(-grad.shape[0] // world_size)
    return rows * (grad[0].numel() if grad.shape[0] else 0)


class TideResult(_groups.AllGatherResult):  # type: ignore[name-defined]
    """What FSDP2 keeps of an all-gather under way."""

    layer: TideLayer


def use_tide(
    model: nn.Module,
    *,
    slots: int = 2,
    chunk: int = 2**20,
    timeout: float = 60.0,
    poison: bool = False,
) -> list[str]:
    """Have the FSDP2 groups of `model` (after `fully_shard`, before the first forward) use TIDE.

    `slots` is the number of layers that may be gathered at the same time, `chunk` the elements that
    a staging buffer holds. Returns a line for each group that stays on torch's collectives. Raises
    `RuntimeError` if this torch's FSDP2 is not one that the seam knows.
    """
    _dispatch()
    shared: dict[dist.ProcessGroup, Tide] = {}
    stayed = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _param_groups(module):
            reason = _unsuitable(group)
            label = name or "the root"
            if reason:
                stayed.append(f"{label} stays on torch's collectives: {reason}")
                continue
            process_group = group._all_gather_process_group
            tide = shared.setdefault(
                process_group, Tide(process_group, slots, chunk, timeout, poison)
            )
            layer = TideLayer(tide, group, label)
            tide.layers.append(layer)
            group._all_gather_comm = group._reduce_scatter_comm = layer
    return stayed


def _param_groups(module: FSDPModule) -> list[Any]:
    """The module's own parameter groups: one in torch 2.11, a list later."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _unsuitable(group: Any) -> str | None:
    """Why TIDE cannot serve a group, or None."""
    if group.device.type != "cpu":
        return f"there is no transport for {group.device.type} yet"
    if group._all_gather_process_group.size() == 1:
        return "it has one rank"
    if group._reduce_scatter_process_group != group._all_gather_process_group:
        return "it reduces over another process group"
    if group._use_post_forward_mesh:
        return "it reshards to a part of the ranks after the forward pass"
    if group.mp_policy.reduce_dtype == torch.float16:
        return "gradients are summed in fp16"
    for param in group.fsdp_params:
        if param.offload_to_cpu:
            return "its parameters are offloaded"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            return "a parameter gathers itself"
    return None


def _dispatch() -> None:
    """Put the three functions' dispatchers in their place, once."""
    if getattr(_fsdp_param_group.foreach_all_gather, "is_tides", False):
        return
    for name, parameters in EXPECTED.items():
        found = list(inspect.signature(getattr(_fsdp_collectives, name)).parameters)
        if found[: len(parameters)] != parameters:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} is not one that TIDE knows ({name} takes "
                f"{found}): set collectives=stock"
            )
    gather = partial(_all_gather, _fsdp_param_group.foreach_all_gather)
    gather.is_tides = True  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_all_gather = gather
    _fsdp_param_group.foreach_all_gather_copy_out = partial(
        _copy_out, _fsdp_param_group.foreach_all_gather_copy_out
    )
    _fsdp_collectives.foreach_reduce_scatter_copy_in = partial(
        _copy_in, _fsdp_collectives.foreach_reduce_scatter_copy_in
    )


def _all_gather(
    stock: Any, params: Any, group: Any, async_op: bool, copy_in_stream: Any, stream: Any,
    device: Any, comm: Any, *rest: Any, **extra: Any,
) -> Any:  # fmt: skip
    if not isinstance(comm, TideLayer):
        return stock(params, group, async_op, copy_in_stream, stream, device, comm, *rest, **extra)
    comm.start()
    result = TideResult(comm.gathered[0], stream.record_event(), None, [], [], [])
    result.layer = comm
    return result


def _copy_out(stock: Any, result: Any, *rest: Any, **extra: Any) -> None:
    if isinstance(result, TideResult):
        result.layer.slot.wait_ready()
    else:
        stock(result, *rest, **extra)


def _copy_in(stock: Any, grads: list[Tensor], buffer: Tensor, world_size: int) -> None:
    layer = getattr(buffer, "tide_layer", None)
    if layer is None:
        stock(grads, buffer, world_size)
    else:
        layer.grads = list(grads)
