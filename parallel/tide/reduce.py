"""The seam's other half, FSDP2's `foreach_reduce` on TIDE.

Gradients are summed straight into shards, or into a flat buffer where something else happens to the
sums first: an all-reduce over replicas, a hook, another dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.tide.layout import Cut
from collectives.tide.reduce_scatter import ReduceScatter
from collectives.tide.slots import Slot


@dataclass(kw_only=True)
class Reduce:
    """The arguments of `foreach_reduce`, and what TIDE adds to them."""

    cuts: Sequence[Cut]
    """Of `fsdp_params`, which have a gradient each."""
    slot: Slot | None
    """To stage in, if it is vacant."""
    tenant: str
    fsdp_params: Sequence[Any]
    unsharded_grads: list[Tensor]
    """Emptied once they have been read."""
    reduce_scatter_group: Any
    reduce_scatter_stream: Any
    reduce_scatter_comm: Any
    orig_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    device: torch.device
    gradient_divide_factor: float | None
    all_reduce_group: dist.ProcessGroup | None
    """The replicas (HSDP)."""
    all_reduce_stream: Any
    all_reduce_grads: bool
    partial_reduce_output: Tensor | None
    all_reduce_hook: Callable[[Tensor], None] | None
    force_sum_reduction_for_comms: bool = False

    def __post_init__(self) -> None:
        self.reduce_dtype = self.reduce_dtype or self.unsharded_grads[0].dtype
        self.orig_dtype = self.orig_dtype or self.reduce_dtype


@torch.no_grad()
def reduce_gradients(call: Reduce, reduce: ReduceScatter, device_handle: Any) -> tuple[Any, ...]:
    """Reduce-scatter, all-reduce over replicas, divide, and give every parameter its gradient.

    Returns what torch 2.13's `foreach_reduce` does: what must stay alive until an event, that event,
    the stream of the last reduction and its event, the all-reduce's buffer and event, partial sums.
    """
    # On a device, reads are still to come when this returns: FSDP2 keeps the gradients until an event.
    kept: Any = list(call.unsharded_grads) if call.device.type != "cpu" else torch.empty(0)
    stream = call.reduce_scatter_stream
    stream.wait_stream(device_handle.current_stream())
    divide, divide_later, replicas_average = _division(call, reduce.topology.world_size)
    sums = (
        reduce.fabric.local.beside or stream
    )  # where they are formed; gradients leave on `stream`
    with device_handle.stream(stream):
        if _direct(call):
            shards, accumulate = _shards_to_write(call)
            _scatter(call, reduce, shards, divide, accumulate)
            event = sums.record_event()
            with device_handle.stream(sums):
                _finish(call, None if accumulate else shards)
            return kept, event, sums, sums.record_event(), None, None, None
        output = torch.zeros(
            sum(c.shard_numel for c in call.cuts), dtype=call.reduce_dtype, device=call.device
        )
        _scatter(call, reduce, _views(call, output), divide, accumulate=False)
        event, last = sums.record_event(), stream
        last.wait_stream(sums)
        all_reduce_event = None
        if call.all_reduce_group is not None:
            if call.partial_reduce_output is not None:
                output += call.partial_reduce_output
            if not call.all_reduce_grads:
                return kept, event, stream, stream.record_event(), None, None, output
            last = call.all_reduce_stream
            last.wait_stream(stream)
            with device_handle.stream(last):
                average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
                operation = average if replicas_average else total
                dist.all_reduce(output, group=call.all_reduce_group, op=operation)
                all_reduce_event = last.record_event()
    if call.all_reduce_hook is not None:
        last = call.all_reduce_stream
        last.wait_stream(stream)
        with device_handle.stream(last):
            call.all_reduce_hook(output)
    with device_handle.stream(last):
        if divide_later != 1:
            output.div_(divide_later)
        _finish(call, _views(call, output.to(call.orig_dtype)))
        # FSDP2 keeps the all-reduce's buffer until its event: the next layer must not be given it.
        buffer = output if call.all_reduce_group is not None else None
        return kept, event, last, last.record_event(), buffer, all_reduce_event, None


def _division(call: Reduce, world_size: int) -> tuple[float, float, bool]:
    """What sums are divided by in the reduce-scatter and at the end; whether replicas average.

    As torch does it, so that roundings are the same, except that sums in fp16 need no division before
    them: they are formed in fp32.
    """
    replicas = call.all_reduce_group.size() if call.all_reduce_group is not None else 1
    factor = call.gradient_divide_factor
    if call.force_sum_reduction_for_comms and call.all_reduce_group is not None:
        return 1.0, factor or float(world_size * replicas), False
    if factor is not None:
        return factor, 1.0, False
    if call.reduce_dtype == torch.float16:
        return float(world_size * replicas), 1.0, False
    return float(world_size), 1.0, True


def _direct(call: Reduce) -> bool:
    """Whether sums are gradients as they are."""
    changed = call.all_reduce_group is not None or call.all_reduce_hook is not None
    return not changed and call.reduce_dtype == call.orig_dtype


def _shards_to_write(call: Reduce) -> tuple[list[Tensor], bool]:
    """This rank's gradients, flat: new ones, or those that exist, to be added to."""
    old = [param.sharded_param.grad for param in call.fsdp_params]
    if all(grad is None for grad in old):
        numel = sum(c.shard_numel for c in call.cuts)
        return _views(call, torch.empty(numel, dtype=call.orig_dtype, device=call.device)), False
    for param, grad in zip(call.fsdp_params, old, strict=True):
        if grad is None:
            zeros = torch.zeros(param.sharded_size, dtype=call.orig_dtype, device=call.device)
            param.sharded_param.grad = param.to_sharded_dtensor(zeros)
    grads = [param.sharded_param.grad._local_tensor for param in call.fsdp_params]
    return [grad.view(-1) for grad in grads], True


def _views(call: Reduce, flat: Tensor) -> list[Tensor]:
    """This rank's parts in a flat buffer that has room for padding."""
    views, start = [], 0
    for param, c in zip(call.fsdp_params, call.cuts, strict=True):
        views.append(flat[start : start + param.sharded_size.numel()])
        start += c.shard_numel
    return views


def _scatter(
    call: Reduce, reduce: ReduceScatter, targets: list[Tensor], divide: float, accumulate: bool
) -> None:
    reduce(
        call.unsharded_grads,
        call.cuts,
        targets,
        divide=divide,
        accumulate=accumulate,
        slot=call.slot,
        tenant=call.tenant,
    )


def _finish(call: Reduce, shards: list[Tensor] | None) -> None:
    """Make `shards` (None: they are already) the parameters' gradients, and run the hooks that wait
    for that."""
    for number, param in enumerate(call.fsdp_params):
        if shards is not None:
            shard = shards[number].view(param.sharded_size)
            if param.sharded_param.grad is None:
                param.sharded_param.grad = param.to_sharded_dtensor(shard)
            else:
                param.sharded_param.grad._local_tensor += shard
        for hook in (param.sharded_param._post_accumulate_grad_hooks or {}).values():
            hook(param.sharded_param)
