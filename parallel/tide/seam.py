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
from parallel.tide.layer import TideLayer
from parallel.tide.pool import Pool, default_node_size
from parallel.tide.reach import Reach, reach
from parallel.tide.suitable import too_small, unsuitable

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
        """Say goodbye to the peers, all ranks at once; the model cannot be run any more."""
        for pool in self.pools:
            pool.close()


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
            reason = unsuitable(group, node_size) or too_small(group, config.smallest)
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
