"""The seam between FSDP2 and TIDE: only this folder touches FSDP2's private names.

FSDP2 keeps all of its state machine, hooks, prefetching and gradient logic. Three functions that its
parameter groups call are dispatched on the object that does the group's communication:

- `foreach_all_gather`: a group that uses TIDE writes its shards into its slot instead;
- `foreach_all_gather_copy_out`: has nothing to copy, and waits for the peers' shards;
- `foreach_reduce`: sums gradients straight into shards (`parallel.tide.reduce`).

Groups that TIDE cannot serve stay on torch's collectives; `use_tide` says which, and why.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _groups

from collectives.config import CollectivesConfig
from collectives.symmetric.fabric import end_process
from collectives.symmetric.transport import PeerError
from collectives.tide.all_gather import Gather
from collectives.tide.layout import Cut, Layout, cut, make_layout
from collectives.tide.slots import Slot
from parallel.tide.pool import Pool, default_node_size
from parallel.tide.reach import Reach, reach
from parallel.tide.reduce import Reduce, reduce_gradients
from parallel.tide.suitable import unsuitable

_fsdp_collectives: Any = _collectives
_fsdp_param_group: Any = _groups

EXPECTED = {
    "foreach_all_gather": [
        "fsdp_params", "group", "async_op", "all_gather_copy_in_stream", "all_gather_stream",
        "device", "all_gather_comm",
    ],
    "foreach_all_gather_copy_out": ["all_gather_result", "fsdp_params", "group"],
    "foreach_reduce": [
        "fsdp_params", "unsharded_grads", "reduce_scatter_group", "reduce_scatter_stream",
        "reduce_scatter_comm", "orig_dtype", "reduce_dtype", "device", "gradient_divide_factor",
        "all_reduce_group", "all_reduce_stream", "all_reduce_grads", "partial_reduce_output",
        "all_reduce_hook", "force_sum_reduction_for_comms",
    ],
}  # fmt: skip
"""What the dispatched functions take, in torch 2.11 to 2.13."""


@dataclass
class Tide:
    """What `use_tide` did to a model."""

    stayed: dict[str, str] = field(default_factory=dict)
    """Why a group, by its module's name, stays on torch's collectives."""
    pools: list[Pool] = field(default_factory=list)
    """One for each process group that parameters are sharded over."""

    def notes(self) -> list[str]:
        """A line for each transport, with the reason why it is not a better one."""
        lines = [
            f"between {pool.device.type.upper()} ranks over {pool.reach.transport}"
            + (f" ({pool.reach.instead})" if pool.reach.instead else "")
            for pool in self.pools
        ]
        return list(dict.fromkeys(lines))

    def close(self) -> None:
        """Say goodbye to the peers; the model cannot be run any more."""
        for pool in self.pools:
            pool.close()


class TideLayer:
    """One FSDP2 parameter group on TIDE; FSDP2 takes it for both of the group's communicators."""

    gather: Gather
    regather: Gather | None = None
    """After a forward pass that leaves the parameters sharded over a part of the ranks."""

    def __init__(self, pool: Pool, group: Any, name: str, state: Any) -> None:
        self.pool, self.group, self.name, self.state = pool, group, name, state
        self.active: Gather | None = None
        """Under way, or in use."""
        self.put_off = False
        self.freed = 0
        self._cuts: dict[Any, Cut] = {}

    # What the pool asks

    @property
    def reshards(self) -> bool:
        """See `Layer.reshards`; FSDP2 decides at its lazy start."""
        return self.group.post_forward_mesh_info is not None

    @property
    def prefetched(self) -> int:
        """See `Layer.prefetched`. FSDP2 itself prefetches one layer in the backward pass."""
        ahead = (self.state._states_to_forward_prefetch, self.state._states_to_backward_prefetch)
        return max(1, *map(len, ahead))

    def cut(self, param: Any) -> Cut:
        """How a parameter is cut over the ranks."""
        if param not in self._cuts:
            size = self.pool.process_group.size()
            self._cuts[param] = cut(param._orig_size, param.fsdp_placement.dim, size)
        return self._cuts[param]

    def lay_out(self) -> Layout:
        """See `Layer.lay_out`; dtypes are known after FSDP2's lazy start."""
        params = self.group.fsdp_params
        size = self.pool.process_group.size()
        return make_layout(size, [(self.cut(p), p.param_dtype or p.orig_dtype) for p in params])

    def enter(self, slot: Slot, layout: Layout) -> None:
        """See `Layer.enter`."""
        self.gather = Gather(slot, layout, self.pool.rail)
        if self.group._use_post_forward_mesh:
            self.regather = self._gather_among_few(slot, layout)
        for param, whole in zip(self.group.fsdp_params, self.gather.tensors, strict=True):
            param.all_gather_outputs = [whole]
            param.alloc_all_gather_outputs = lambda: None
            param.free_unsharded_param = self._free

    def _gather_among_few(self, slot: Slot, layout: Layout) -> Gather:
        """The same tensors from larger, contiguous shards on fewer ranks."""
        few = dist.get_process_group_ranks(self.group.post_forward_mesh_info.shard_process_group)
        everyone = dist.get_process_group_ranks(self.pool.process_group)
        size = slot.fabric.topology.node_size
        cuts = []
        for c, dtype in zip(layout.cuts, layout.dtypes, strict=True):
            numel = c.shard_numel * layout.world_size
            cuts.append((Cut(1, numel // len(few), numel), dtype))
        members = [everyone.index(rank) % size for rank in few]
        return Gather(slot, make_layout(len(few), cuts), members=members)

    # What FSDP2 asks

    def start(self) -> None:
        """Write this rank's shards to all peers, or put that off while another layer is in the slot.

        That happens to prefetched layers where layers run in another order than they are registered.
        """
        if self.pool.fabric is None:
            self.pool.build()
        self._take_back_what_nobody_used()
        self.put_off = self.gather.slot.tenant is not None
        if self.put_off:
            self.pool.say_put_off(self.name, str(self.gather.slot.tenant))
        else:
            self._start()

    def _start(self) -> None:
        params = self.group.fsdp_params
        if self.regather is not None and self.group.is_sharded_post_forward:
            shards = [param._sharded_post_forward_param_data for param in params]
            self.active = self.regather
            self.regather.start(shards, f"{self.name} again")
        else:
            self.active = self.gather
            self.gather.start([param._sharded_param_data for param in params], self.name)

    def wait(self) -> None:
        """Until the peers' shards are here. Raises `SlotError` if another layer is still in the slot."""
        if self.put_off:
            self.put_off = False
            self._start()
        assert self.active is not None
        self.active.wait()

    def _free(self) -> None:
        """FSDP2 gives one parameter back; the slot is free when all of the group are."""
        self.freed += 1
        if self.freed == len(self.group.fsdp_params):
            self.freed, self.active = 0, None
            self.gather.slot.release()

    def _take_back_what_nobody_used(self) -> None:
        """FSDP2 forgets a layer that it prefetched in vain; its slot must not stay taken."""
        slot = self.gather.slot
        for layer in self.pool.layers if slot.tenant else ():
            assert isinstance(layer, TideLayer)
            forgotten = layer.group._all_gather_result is None and not layer.group.is_unsharded
            if layer.gather.slot is slot and layer.active is not None and forgotten:
                layer.active.wait()
                layer.active = None
                slot.release()

    def reduce(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Do what `foreach_reduce` does with its `arguments`; returns what it returns."""
        params = arguments["fsdp_params"]
        absent = [
            param._param_fqn or param._module_info.param_name
            for param in self.group.fsdp_params
            if param.sharded_param.requires_grad and param not in params
        ]
        without = f" without {', '.join(absent)}" if absent else ""
        call = Reduce(
            cuts=[self.cut(param) for param in params],
            slot=self.gather.slot if self.pool.slot_reuse else None,
            tenant=f"the gradients of {self.name}{without}",
            **arguments,
        )
        assert self.pool.reduce is not None
        return reduce_gradients(call, self.pool.reduce, self.group.device_handle)


class TideResult(_groups.AllGatherResult):  # type: ignore[name-defined]
    """What FSDP2 keeps of an all-gather under way."""

    layer: TideLayer


def use_tide(
    model: nn.Module,
    config: CollectivesConfig | None = None,
    node_size: int | None = None,
    give_up: Callable[[PeerError], None] = end_process,
) -> Tide:
    """Have the FSDP2 groups of `model` (after `fully_shard`, before the first forward) use TIDE.

    `node_size` is the number of consecutive ranks on a node; None: as the launcher says. On GPUs, where
    nothing can be raised while a stream waits for a rank that is silent for longer than
    `collectives.timeout`, `give_up` is called from another thread; it must not return, and by default
    prints the error and ends the process. Raises `RuntimeError` if this torch's FSDP2 is not one that
    the seam knows.
    """
    _dispatch()
    config, tide = config or CollectivesConfig(name="tide"), Tide()
    node_size = node_size or default_node_size()
    pools: dict[dist.ProcessGroup, Pool] = {}
    reached: dict[dist.ProcessGroup, Reach] = {}
    states = set()
    for name, module in model.named_modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state is None or state in states:  # several modules may share one
            continue
        states.add(state)
        for number, group in enumerate(_param_groups(state)):
            label = (name or "the root") + (f", group {number}" if number else "")
            process_group = group._all_gather_process_group
            reason = unsuitable(group, node_size)
            if not reason and process_group not in reached:
                ranks = dist.get_process_group_ranks(process_group)
                reached[process_group] = reach(group.device, config.transport, ranks, node_size)
            if not reason and reached[process_group].transport is None:
                reason = reached[process_group].reason
            if reason:
                tide.stayed[label] = reason
                continue
            if process_group not in pools:
                pools[process_group] = Pool(
                    process_group, config, node_size, group.device, reached[process_group], give_up
                )
                tide.pools.append(pools[process_group])
            layer = TideLayer(pools[process_group], group, label, state)
            pools[process_group].layers.append(layer)
            group._all_gather_comm = group._reduce_scatter_comm = layer
    return tide


def _param_groups(state: Any) -> list[Any]:
    """A module's own parameter groups: one in torch 2.11, a list later."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


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
    stock = _fsdp_param_group.foreach_reduce
    _fsdp_param_group.foreach_reduce = partial(_reduce, stock, len(_return_types(stock)))


def _all_gather(
    stock: Any, params: Any, group: Any, async_op: bool, copy_in_stream: Any, stream: Any,
    device: Any, comm: Any, *rest: Any, **extra: Any,
) -> Any:  # fmt: skip
    if not isinstance(comm, TideLayer):
        return stock(params, group, async_op, copy_in_stream, stream, device, comm, *rest, **extra)
    stream.wait_stream(copy_in_stream)
    with comm.group.device_handle.stream(stream):
        comm.start()
        event = stream.record_event()
    result = TideResult(comm.gather.tensors[0], event, None, [], [], [])
    result.layer = comm
    return result


def _copy_out(stock: Any, result: Any, *rest: Any, **extra: Any) -> None:
    if isinstance(result, TideResult):
        if result.all_gather_event is not None:
            handle = result.layer.group.device_handle
            handle.current_stream().wait_event(result.all_gather_event)
        result.layer.wait()
    else:
        stock(result, *rest, **extra)


def _reduce(stock: Any, num_returned: int, *given: Any, **named: Any) -> Any:
    arguments = dict(zip(EXPECTED["foreach_reduce"], given, strict=False), **named)
    comm = arguments["reduce_scatter_comm"]
    mixed = len({grad.dtype for grad in arguments["unsharded_grads"]}) > 1
    if not isinstance(comm, TideLayer) or mixed:  # torch has its own error for mixed dtypes
        return stock(*given, **named)
    # torch 2.11 returns six values; later ones the stream of the last reduction, too, in third place.
    values = comm.reduce(arguments)
    return values if num_returned == len(values) else values[:2] + values[3:]


def _return_types(function: Any) -> tuple[Any, ...]:
    annotation: Any = inspect.signature(function, eval_str=True).return_annotation
    return tuple(annotation.__args__)
