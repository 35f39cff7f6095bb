"""All-gather and reduce-scatter over slow transports and virtual nodes, against plain sums."""

import weakref

import pytest
import torch
import torch.distributed as dist

from collectives.tide import reuse as reuse_
from collectives.tide.all_gather import Gather
from collectives.tide.layout import cut, make_layout
from collectives.tide.rail import Rail
from collectives.tide.reduce_scatter import DEPTH, ReduceScatter
from collectives.tide.slots import OrderError, Slot, SlotError, channels_of
from tests.collectives.slow import connect, finish
from tests.ranks import run_ranks

NODES = [(2, 8), (3, 3), (4, 2), (6, 2), (4, 1), (3, 1)]
"""Ranks, and how many of them are a node."""


def make_rail(fabric, first_channel, in_flight=2):
    return Rail(fabric.network, first_channel, in_flight) if fabric.network else None


def wholes_of(layer, shapes):
    generator = torch.Generator().manual_seed(100 + layer)
    return [torch.randn(shape, generator=generator) for shape, _ in shapes]


def shard_of(whole, dim, rank, size):
    step = -(-whole.shape[dim] // size)
    part = whole.narrow(dim, min(rank * step, whole.shape[dim]),
                        max(min(step, whole.shape[dim] - rank * step), 0))  # fmt: skip
    padded = torch.zeros([*whole.shape[:dim], step, *whole.shape[dim + 1 :]])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded.view(-1)


def check_gather(node_size, rounds, multicast):
    """Five layers of two dtypes take turns in two slots; every gather is compared whole."""
    fabric = connect(node_size=node_size, multicast=multicast)
    size, rank = fabric.topology.world_size, fabric.topology.rank
    shapes = [((7,), 0), ((0, 3), 0), ((5, size * 3), 1), ((33, 2), 0), ((2, size, 3), 1)]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    layout = make_layout(size, [(cut(*s, size), d) for s, d in zip(shapes, dtypes, strict=True)])
    slots = [Slot(fabric, fabric.allocate(layout.nbytes), i, poison=True) for i in range(2)]
    rail = make_rail(fabric, channels_of(2))
    gathers = [Gather(slots[n % 2], layout, rail, piece=48, whole=0) for n in range(5)]
    for turn in range(rounds):
        layer = turn % 5
        wholes = wholes_of(layer, shapes)
        shards = [shard_of(w, dim, rank, size) for w, (_, dim) in zip(wholes, shapes, strict=True)]
        gathers[layer].start(shards, f"layer {layer}")
        gathers[layer].wait()
        for got, whole, dtype in zip(gathers[layer].tensors, wholes, dtypes, strict=True):
            assert torch.equal(got[: whole.numel()], whole.reshape(-1).to(dtype))
            assert got.storage_offset() == 0
        slots[layer % 2].release()
    fabric.local.flush()
    dist.barrier()  # nobody writes into released memory any more: a stale alias reads NaN
    assert all(whole.isnan().all() for gather in gathers for whole in gather.tensors)
    finish(fabric)


@pytest.mark.parametrize(("world_size", "node_size"), NODES)
def test_gathers_are_exact_in_slots_that_take_turns(world_size, node_size):
    run_ranks(world_size, check_gather, node_size, 25, False)


@pytest.mark.parametrize(("world_size", "node_size"), [(3, 3), (4, 2)])
def test_multicast_reaches_the_same_places(world_size, node_size):
    run_ranks(world_size, check_gather, node_size, 25, True)


def check_too_few_slots():
    fabric = connect()
    layout = make_layout(2, [(cut((4,), 0, 2), torch.float32)])
    gather = Gather(Slot(fabric, fabric.allocate(layout.nbytes), 0), layout)
    gather.start([torch.ones(2)], "layer 0")
    with pytest.raises(SlotError) as error:
        gather.start([torch.ones(2)], "layer 2")
    finish(fabric)
    return str(error.value)


def test_a_slot_that_is_in_use_is_refused_on_every_rank():
    for message in run_ranks(2, check_too_few_slots):
        assert (
            "layer 2 is gathered while layer 0 still uses slot 0: set collectives.slots" in message
        )


def check_order(node_size):
    fabric = connect(node_size=node_size)
    size = fabric.topology.world_size
    layout = make_layout(size, [(cut((4,), 0, size), torch.float32)])
    gather = Gather(Slot(fabric, fabric.allocate(layout.nbytes), 0), layout, make_rail(fabric, 2))

    def turns():
        for _ in range(2):
            gather.start([torch.ones(4 // size)], f"layer {fabric.topology.rank}")
            gather.wait()
            gather.slot.release()

    with pytest.raises(OrderError) as error:
        turns()
    finish(fabric)
    return str(error.value)


@pytest.mark.parametrize("node_size", [1, 2])
def test_ranks_that_gather_different_layers_find_out(node_size):
    for message in run_ranks(2, check_order, node_size):
        assert "All ranks must run the same layers in the same order" in message


def grads_of(turn, rank, shapes, dtype):
    generator = torch.Generator().manual_seed(31 * turn + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, _ in shapes]


def ordered_sum(grads, topology):
    """Of one tensor from every rank: inside the nodes by rank, then from this node backwards."""
    shares = []
    for node in range(topology.num_nodes):
        share = grads[topology.member(node, 0)].float()
        for local in range(1, topology.node_size):
            share = share + grads[topology.member(node, local)].float()
        shares.append(share)
    total = shares[topology.node]
    for step in range(1, topology.num_nodes):
        total = total + shares[(topology.node - step) % topology.num_nodes]
    return total


def check_reduce(node_size, dtype, chunk, rounds, reuse, accumulate):
    reuse_.WHOLE = 0  # several groups, small as they are
    fabric = connect(node_size=node_size)
    size, rank = fabric.topology.world_size, fabric.topology.rank
    shapes = [((5, 3), 0), ((1, 4), 0), ((8,), 0), ((6, 2 * size), 1), ((257,), 0)]
    cuts = [cut(*shape, size) for shape in shapes]
    layout = make_layout(size, [(c, dtype) for c in cuts])
    slot = Slot(fabric, fabric.allocate(layout.nbytes), 0, poison=True) if reuse else None
    reduce = ReduceScatter(fabric, chunk, first_channel=channels_of(1))
    for turn in range(rounds):
        everyone = [grads_of(turn, r, shapes, dtype) for r in range(size)]
        targets = [torch.full((c.held(rank),), float(turn)) for c in cuts]
        mine = everyone[rank]
        expected = []
        for t, (_, dim) in enumerate(shapes):
            total = ordered_sum([grads[t] for grads in everyone], fabric.topology)
            expected.append(shard_of(total, dim, rank, size)[: cuts[t].held(rank)] / size)
        reduce(
            mine, cuts, targets, divide=float(size), accumulate=accumulate, slot=slot, tenant="x"
        )
        assert mine == []
        for got, want in zip(targets, expected, strict=True):
            assert torch.equal(got, want + turn if accumulate else want)
    finish(fabric)
    return reduce.staging_nbytes


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("world_size", "node_size"), NODES)
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 16), (torch.float32, 300)])
def test_sums_are_those_in_the_documented_order_in_fp32(world_size, node_size, dtype, chunk, reuse):
    run_ranks(world_size, check_reduce, node_size, dtype, chunk, 20, reuse, False)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("world_size", "node_size"), [(3, 3), (4, 2)])
def test_sums_are_added_to_what_is_there(world_size, node_size, reuse):
    run_ranks(world_size, check_reduce, node_size, torch.float16, 50, 10, reuse, True)


def check_when_gradients_are_free(reuse):
    """Whether the gradients' memory is free when the first sum is formed."""
    fabric = connect()
    shape = cut((64, 8), 0, 2)
    layout = make_layout(2, [(shape, torch.bfloat16)])
    slot = Slot(fabric, fabric.allocate(layout.nbytes), 0) if reuse else None
    reduce = ReduceScatter(fabric, 32, first_channel=channels_of(1))
    grads = [torch.ones(64, 8, dtype=torch.bfloat16)]
    memory = weakref.ref(grads[0].untyped_storage())
    seen = []
    original = ReduceScatter.sum_and_cross

    def watched(self, *args):
        seen.append(memory() is None)
        original(self, *args)

    ReduceScatter.sum_and_cross = watched
    reduce(grads, [shape], [torch.zeros(256)], slot=slot, tenant="x")
    finish(fabric)
    return seen[0], memory() is None


@pytest.mark.parametrize("reuse", [False, True])
def test_gradients_are_free_once_they_are_read(reuse):
    """With a slot to stage in, before anything is summed; without, at the end."""
    assert run_ranks(2, check_when_gradients_are_free, reuse) == [(reuse, True)] * 2


def check_different_sets(node_size):
    fabric = connect(node_size=node_size)
    reduce = ReduceScatter(fabric, 8, first_channel=0)
    with pytest.raises(OrderError) as error:
        reduce([torch.ones(4)], [cut((4,), 0, 2)], [torch.zeros(2)], tenant=f"{fabric.local.rank}")
    finish(fabric)
    return str(error.value)


def test_ranks_that_reduce_different_parameters_find_out():
    for message in run_ranks(2, check_different_sets, 2):
        assert "set_reduce_scatter_unused_params" in message


@pytest.mark.parametrize("chunk", [128, 1024])
def test_staging_is_constant_in_the_number_of_nodes(chunk):
    """B = d (L-1) 2C on the node, and between nodes (d + d) 4C more, however many they are."""
    nodes_of_two = {
        nodes: run_ranks(2 * nodes, check_reduce, 2, torch.bfloat16, chunk, 1, False, False)[0]
        for nodes in (1, 2, 4)
    }
    on_the_node, between = DEPTH * 1 * 2 * chunk, 2 * DEPTH * 4 * chunk
    assert nodes_of_two == {1: on_the_node, 2: on_the_node + between, 4: on_the_node + between}
