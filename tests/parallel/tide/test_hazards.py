"""Each hazard of `docs/tide.md`: a run that meets it and is right, and the same run with the protection
taken away, which must go wrong. Without the second, the first would prove nothing."""

import struct
import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from collectives.symmetric import shm
from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import PeerError
from collectives.tide import all_gather, layout, reduce_scatter, slots
from collectives.tide.layout import cut, make_layout
from collectives.tide.slots import OrderError, Slot, SlotError
from collectives.tide.sums import Sum
from parallel.tide import layer as layer_module
from parallel.tide import seam
from parallel.tide.layer import TideLayer
from tests.collectives import slow
from tests.parallel.tide.training import Case, batch, both, build, loss_of, replaced
from tests.ranks import run_ranks

PATIENCE = {"timeout": 10}
"""Seconds; a protection that is missing often ends in waiting for ever."""


def first_step(case, **options):
    model = build(case, "tide")
    loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0).backward()
    return model


# 1. FSDP2 takes a parameter's storage to begin at its first element, and frees it by resizing


def meets_aliasing():
    both(Case(steps=2), "stock")


def one_arena(self, region, rank):
    arena = region.tensor(rank, 0, self.nbytes, torch.uint8)
    return [
        arena[offset : offset + c.shard_numel * self.world_size * dtype.itemsize].view(dtype)
        for c, dtype, offset in zip(self.cuts, self.dtypes, self.offsets, strict=True)
    ]


def shares_an_arena():
    return replaced(layout.Layout, "tensors", one_arena)


def lets_fsdp_free():
    original = TideLayer.enter

    def enter(self, slot, its_layout):
        original(self, slot, its_layout)
        for param in self.group.fsdp_params:
            del param.free_unsharded_param

    return replaced(TideLayer, "enter", enter)


# 2. A peer overwrites a layer that is still read: rank 1 computes slowly, rank 0 gathers ahead


def meets_overwriting():
    if dist.get_rank() == 1:
        torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: time.sleep(0.005))
    both(Case(parallel={"prefetch": 1}, steps=3, tide={"poison": False}), "stock")


def does_not_wait_for_release():
    original = slots.wait_stamped

    def wait(link, peer, channel, count, tenant):
        if channel % 2 == 0:
            original(link, peer, channel, count, tenant)

    return replaced(slots, "wait_stamped", wait)


# 3. More layers at the same time than slots


def meets_too_few_slots():
    model = first_step(Case(tide={"slots": 2, **PATIENCE}))
    layers = model.model.layers
    layers[0].unshard()
    layers[1].unshard()
    with pytest.raises(SlotError, match="set collectives.slots"):
        layers[2].unshard()
    dist.barrier()


def forgets_the_tenant():
    nobody = property(lambda self: None, lambda self, value: None)
    return replaced(Slot, "tenant", nobody)


# 4. A stale alias


def meets_a_stale_alias():
    model = first_step(Case())
    layer = model.model.layers[0]
    layer.unshard()
    kept = layer.mlp.up_proj.weight.data
    layer.reshard()
    dist.barrier()
    assert kept.isnan().all()


def does_not_poison():
    original = slots.Slot.__post_init__

    def init(self):
        original(self)
        self.poison = False

    return replaced(slots.Slot, "__post_init__", init)


# 5. Autograd remembers the parameters of the forward pass


def meets_accumulation():
    both(Case(steps=2, accumulation=2), "stock")


def rebuilds_parameters():
    original = TideLayer.wait

    def wait(self):
        original(self)
        for param in self.group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                del param._unsharded_param

    return replaced(TideLayer, "wait", wait)


# 6. Version counters


def writes_through_the_parameters():
    original = all_gather.Gather.__post_init__

    def init(self):
        original(self)
        for portion in self._own:
            for number, part in enumerate(portion.parts):
                block, whole = part.block, self.tensors[part.tensor]
                begin = (block.offset - self.layout.offsets[part.tensor]) // block.dtype.itemsize
                view = whole.as_strided((block.rows, block.width), (block.pitch, 1), begin)
                portion.places[number] = view

    return replaced(all_gather.Gather, "__post_init__", init)


# 7. A gradient is freed while a copy still reads it


def meets_late_reads():
    both(Case("toy", steps=3, slow=True, tide=PATIENCE), "stock")


def does_not_flush():
    return replaced(slow.Deferred, "flush", lambda self: None)


# 8. Ranks that wait for each other in a circle


def meets_circles():
    both(Case("toy", node_size=1, steps=2, tide={"pacing": 1, **PATIENCE}), "stock")


def takes_before_it_gives():
    def travel(self):
        topology, region = self.slot.fabric.topology, self.slot.memory.remote
        for step in all_gather.doubling(topology.node, topology.num_nodes):
            for coming in self._pieces(step.receives):
                self.rail.take(step.source)
                self._spread(iter([(coming.view(self._region, topology.local), coming)]))
            for going in self._pieces(step.sends):
                source = going.view(self._region, topology.local)
                self.rail.put(source, region, going.offset, step.target, going.pitch)

    return replaced(all_gather.Gather, "_travel", travel)


# 9. A silent peer


def meets_silence():
    memory = SharedMemory(timeout=1.0)
    if memory.rank == 1:
        time.sleep(8)
        return
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 1"):
        memory.wait(1, 0, 1)
    assert time.monotonic() - begin < 7


def waits_for_ever():
    def wait(self, peer, channel, value, about=""):
        link = self._sockets[peer]
        link.settimeout(None)
        while self._seen.get((peer, channel), 0) < value:
            self._take(peer, self._guard(peer, partial(link.recv, 1)), link)

    return replaced(SharedMemory, "wait", wait)


# 10. Numbers that wrap around


def meets_large_numbers():
    fabric = slow.connect(timeout=4)
    its_layout = make_layout(2, [(cut((4,), 0, 2), torch.float32)])
    slot = Slot(fabric, fabric.allocate(its_layout.nbytes), 0)
    slot.tenancy, slot._last = 2**32 - 3, "layer"
    for link, peer in slot._links:
        link.signal(peer, slot._free, slots.stamp(slot.tenancy, "layer"))
    gather = all_gather.Gather(slot, its_layout)
    for turn in range(8):
        gather.start([torch.full((2,), float(turn))], "layer")
        gather.wait()
        assert (gather.tensors[0] == turn).all()
        slot.release()
    slow.finish(fabric)


def keeps_32_bits():
    class Short(struct.Struct):
        def pack(self, channel, value):
            return super().pack(channel, value % 2**32)

    return replaced(shm, "MESSAGE", Short("=II"))


# 11. The all-reduce's buffer over replicas must outlive the layer


def meets_replicas():
    used, returned = [], []
    all_reduce = dist.all_reduce

    def watched(tensor, *args, **kwargs):
        used.append(tensor.data_ptr())
        return all_reduce(tensor, *args, **kwargs)

    case = Case(parallel={"replicate": 2, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"})
    model = build(case, "tide")
    reduce = _fsdp_param_group.foreach_reduce

    def kept(*args):
        values = reduce(*args)
        returned.append(values[-3])
        return values

    with replaced(dist, "all_reduce", watched), replaced(_fsdp_param_group, "foreach_reduce", kept):
        loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0).backward()
    assert [tensor.data_ptr() for tensor in returned] == used
    assert len(used) == 5
    dist.barrier()


def lets_the_buffer_go():
    original = layer_module.reduce_gradients

    def reduce(*args):
        values = list(original(*args))
        values[4] = torch.empty(0)
        return tuple(values)

    return replaced(layer_module, "reduce_gradients", reduce)


# 12. Nothing is allocated after the first step


def meets_allocation():
    case = Case()
    model = first_step(case)
    allocated = []
    original = SharedMemory.allocate

    def allocate(self, nbytes):
        allocated.append(nbytes)
        return original(self, nbytes)

    with replaced(SharedMemory, "allocate", allocate):
        loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0).backward()
    assert allocated == []
    dist.barrier()


def allocates_again():
    original = TideLayer.start

    def start(self):
        if self.pool.fabric is not None:
            self.pool.fabric.allocate(256)
        original(self)

    return replaced(TideLayer, "start", start)


# 13. Parameters that one rank does not use


def meets_different_sets():
    case = Case("toy", unused=True, tide=PATIENCE)
    model = build(case, "tide")
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_hook(lambda m, _, out: out + m.unused.sum(), prepend=True)
    loss = loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0)
    with pytest.raises(OrderError, match="set_reduce_scatter_unused_params"):
        loss.backward()
    dist.barrier()


def does_not_compare():
    def wait(link, peer, channel, count, tenant):
        link.wait(peer, channel, count << slots.MARK_BITS)

    stack = ExitStack()
    stack.enter_context(replaced(slots, "wait_stamped", wait))
    stack.enter_context(replaced(reduce_scatter, "wait_stamped", wait))
    return stack


# 14. Gradients that are reduced over other ranks than weights are gathered from


def meets_other_ranks():
    model = build(Case("toy"), "stock")
    pair = dist.new_group([0, 1])
    dist.new_group([2, 3])
    group, other = _fsdp_param_group.FSDPParamGroup, property(lambda self: pair)
    with replaced(group, "_reduce_scatter_process_group", other):
        stayed = seam.use_tide(model, node_size=8).stayed
    dist.barrier()
    assert set(stayed.values()) == {"it reduces over other ranks than it gathers from"}


def does_not_look_at_the_group():
    def none(*args):
        return None

    return replaced(seam, "unsuitable", none)


# 15. The order and precision of sums


def meets_three_addends():
    for dtype in ("float32", "bfloat16"):
        parallel = {"param_dtype": dtype, "reduce_dtype": "float32"}
        both(Case(steps=2, parallel=parallel), "ordered")


def sums_backwards():
    original = reduce_scatter.add_up

    def add(each, *args, **kwargs):
        original([Sum(s.parts[::-1], s.total) for s in each], *args, **kwargs)

    return replaced(reduce_scatter, "add_up", add)


def sums_in_bf16():
    original = reduce_scatter.add_up

    def add(each, *args, **kwargs):
        rounded = [Sum([sum(part.clone() for part in s.parts)], s.total) for s in each]
        original(rounded, *args, **kwargs)

    return replaced(reduce_scatter, "add_up", add)


WRONG_NUMBERS = "assert got == expected"
SILENT = r"was silent|did not signal"
HAZARDS = {
    "1 storage": (
        2, meets_aliasing, {shares_an_arena: WRONG_NUMBERS, lets_fsdp_free: "not resizable"}
    ),
    "2 overwriting": (2, meets_overwriting, {does_not_wait_for_release: WRONG_NUMBERS}),
    "3 too few slots": (2, meets_too_few_slots, {forgets_the_tenant: SILENT}),
    "4 stale alias": (2, meets_a_stale_alias, {does_not_poison: "assert kept.isnan"}),
    "5 identity": (2, meets_accumulation, {rebuilds_parameters: WRONG_NUMBERS}),
    "6 versions": (2, meets_accumulation, {writes_through_the_parameters: "inplace operation"}),
    "7 late reads": (2, meets_late_reads, {does_not_flush: "freed before it was read"}),
    "8 circles": (2, meets_circles, {takes_before_it_gives: SILENT}),
    "9 silence": (2, meets_silence, {waits_for_ever: "begin < 7"}),
    "10 numbers": (2, meets_large_numbers, {keeps_32_bits: SILENT}),
    "11 replicas": (4, meets_replicas, {lets_the_buffer_go: "== used"}),
    "12 allocation": (2, meets_allocation, {allocates_again: r"allocated == \[\]"}),
    "13 sets": (2, meets_different_sets, {does_not_compare: "DID NOT RAISE"}),
    "14 groups": (4, meets_other_ranks, {does_not_look_at_the_group: "assert set"}),
    "15 sums": (
        3, meets_three_addends,
        {sums_backwards: r"state\[name\] == weights|got == expected", sums_in_bf16: WRONG_NUMBERS},
    ),
}  # fmt: skip
"""Ranks, the run, and how it goes wrong without each of its protections."""


def without(protection, check):
    with protection():
        check()


@pytest.mark.parametrize("hazard", list(HAZARDS))
def test_hazard_is_met(hazard):
    world_size, check, _ = HAZARDS[hazard]
    run_ranks(world_size, check)


@pytest.mark.parametrize(
    ("hazard", "protection"), [(h, p) for h, (_, _, ways) in HAZARDS.items() for p in ways]
)
def test_hazard_shows_without_its_protection(hazard, protection):
    world_size, check, ways = HAZARDS[hazard]
    with pytest.raises(AssertionError, match=ways[protection]):
        run_ranks(world_size, without, protection, check, timeout=100)
