"""One FSDP2 parameter group on TIDE: its turns in a slot, and what FSDP2 asks of its communicators."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from collectives.tide.all_gather import Gather
from collectives.tide.layout import Cut, Layout, cut, make_layout
from collectives.tide.slots import Slot
from parallel.tide.pool import Pool
from parallel.tide.reduce import Reduce, reduce_gradients


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
        self._fresh = False
        """Whether the shards have been cast for a gather to come."""
        self._cast_versions: tuple[int, ...] = ()

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
        keep = self.reshards and self.pool.cast_ahead
        self.gather = Gather(slot, layout, self.pool.rail, keep=keep)
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
        if self.state._is_root:
            for layer in self.pool.layers:  # another forward pass, perhaps with other weights
                assert isinstance(layer, TideLayer)
                layer._fresh = False
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
            return
        self.active = self.gather
        if self.gather.keep:
            self._freshen()
        self.gather.start(None if self.gather.keep else self._shards(), self.name)

    def _shards(self) -> list[Tensor]:
        return [param._sharded_param_data for param in self.group.fsdp_params]

    def _freshen(self) -> None:
        """Cast the shards, unless that has been done since they changed.

        The first layer of a forward pass casts those of all: the device has little else to do then. The
        backward pass finds what the forward pass has left.
        """
        backward = self.group._training_state == TrainingState.PRE_BACKWARD
        known = self._cast_versions == self._versions()
        if not (known and (backward or self._fresh)):
            self._cast()
            if not backward:
                for layer in self.pool.layers:
                    assert isinstance(layer, TideLayer)
                    if layer is not self and layer.gather.keep:
                        layer._cast()
                        layer._fresh = True
        self._fresh = False

    def _cast(self) -> None:
        self.gather.cast(self._shards())
        self._cast_versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """They grow when somebody writes to the shards."""
        return tuple(param._sharded_param_data._version for param in self.group.fsdp_params)

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
        if self.pool.fabric is None:  # somebody else gathers
            self.pool.build()
        params = arguments["fsdp_params"]
        absent = [
            param._param_fqn or param._module_info.param_name
            for param in self.group.fsdp_params
            if param.sharded_param.requires_grad and param not in params
        ]
        without = f" without {', '.join(absent)}" if absent else ""
        call = Reduce(
            cuts=[self.cut(param) for param in params],
            slot=self.gather.slot if self.pool.slot_reuse and self.pool.slots else None,
            tenant=f"the gradients of {self.name}{without}",
            **arguments,
        )
        assert self.pool.reduce is not None
        return reduce_gradients(call, self.pool.reduce, self.group.device_handle)
