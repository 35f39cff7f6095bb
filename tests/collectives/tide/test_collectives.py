"""All-gather and reduce-scatter on shared memory, against sums and concatenations in fp64."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from collectives.symmetric.shm import SharedMemory
from collectives.tide.all_gather import start_all_gather
from collectives.tide.reduce_scatter import DEPTH, ReduceScatter, pieces
from collectives.tide.slots import ALIGNMENT, Slot, SlotError, make_layout
from tests.ranks import run_ranks


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 30))
def test_pieces_cover_every_element_once(numels, world_size, chunk):
    shard_numels = [-(-n // world_size) for n in numels]
    total = sum(shard_numels)
    seen = [[] for _ in numels]
    for rank in range(world_size):
        targets = []
        for begin in range(0, total, chunk):
            for piece in pieces(numels, shard_numels, rank, begin, min(begin + chunk, total)):
                assert begin <= piece.target
                assert piece.target + piece.numel <= begin + chunk
                seen[piece.tensor] += range(piece.source, piece.source + piece.numel)
                targets += range(piece.target, piece.target + piece.numel)
        assert len(set(targets)) == len(targets)
    assert [sorted(s) for s in seen] == [list(range(n)) for n in numels]


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_layouts_are_aligned_and_do_not_overlap(shards, world_size):
    layout = make_layout(world_size, shards)
    end = 0
    for numel, dtype, offset in zip(
        layout.shard_numels, layout.dtypes, layout.offsets, strict=True
    ):
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + numel * world_size * dtype.itemsize
    assert end <= layout.nbytes


class Late(SharedMemory):
    """Shared memory in which every operation may take its time, so that ranks meet in any order."""

    def _pause(self):
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * 0.002)

    def __init__(self, *args, **kwargs):
        self._random = random.Random(dist.get_rank())
        super().__init__(*args, **kwargs)

    def put(self, *args):
        self._pause()
        super().put(*args)

    def signal(self, *args):
        self._pause()
        super().signal(*args)

    def wait(self, *args):
        self._pause()
        super().wait(*args)


def shards_of(layer, rank, sizes):
    generator = torch.Generator().manual_seed(100 * layer + rank)
    return [torch.randn(n, generator=generator) for n in sizes]


def check_gather(rounds):
    """Five layers of two dtypes take turns in two slots; every gather is compared whole."""
    transport = Late(timeout=20)
    size, sizes = transport.world_size, [7, 0, 130, 33]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    layout = make_layout(size, list(zip(sizes, dtypes, strict=True)))
    slots = [Slot(transport, transport.allocate(layout.nbytes), i, poison=True) for i in range(2)]
    for turn in range(rounds):
        layer = turn % 5
        slot = slots[layer % 2]
        gathered = slot.tensors(layout)
        shards = shards_of(layer, transport.rank, sizes)
        start_all_gather(slot, layout, shards, f"layer {layer}")
        slot.wait_ready()
        for t, whole in enumerate(gathered):
            expected = torch.cat([shards_of(layer, r, sizes)[t] for r in range(size)])
            assert torch.equal(whole, expected.to(dtypes[t]))
            assert whole.storage_offset() == 0
        slot.release()
    dist.barrier()  # nobody writes into released memory any more: a stale alias reads NaN
    assert all(whole.isnan().all() for slot in slots for whole in slot.tensors(layout))


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_are_exact_in_slots_that_take_turns(world_size):
    run_ranks(world_size, check_gather, 1000)


def check_too_few_slots():
    transport = SharedMemory(timeout=5)
    layout = make_layout(transport.world_size, [(4, torch.float32)])
    slot = Slot(transport, transport.allocate(layout.nbytes), 0)
    start_all_gather(slot, layout, [torch.ones(4)], "layer 0")
    try:
        start_all_gather(slot, layout, [torch.ones(4)], "layer 2")
    except SlotError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_a_slot_that_is_in_use_is_refused_on_every_rank():
    for message in run_ranks(2, check_too_few_slots):
        assert (
            "layer 2 is gathered while layer 0 still uses slot 0: set collectives.slots" in message
        )


def grads_of(turn, rank, shapes, dtype):
    generator = torch.Generator().manual_seed(31 * turn + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check_reduce(dtype, chunk, rounds):
    transport = Late(timeout=20)
    size, rank = transport.world_size, transport.rank
    shapes = [(5, 3), (1, 4), (8,), (6, 2), (257,)]
    shard_numels = [-(-s[0] // size) * torch.Size(s[1:]).numel() for s in shapes]
    reduce = ReduceScatter(transport, chunk, first_channel=10)
    for turn in range(rounds):
        everyone = [grads_of(turn, r, shapes, dtype) for r in range(size)]
        out = torch.full((sum(shard_numels),), torch.nan)
        reduce(everyone[rank], shard_numels, out, divide=float(size))
        at = 0
        for t, shard in enumerate(shard_numels):
            total = everyone[0][t].float()
            for r in range(1, size):
                total = total + everyone[r][t].float()
            mine = (total / size).reshape(-1)[rank * shard : (rank + 1) * shard]
            assert torch.equal(out[at : at + len(mine)], mine)
            assert (out[at + len(mine) : at + shard] == 0).all()
            at += shard
    dist.barrier()
    return reduce.staging_bytes


@pytest.mark.parametrize(
    ("world_size", "dtype", "chunk"),
    [(2, torch.bfloat16, 16), (3, torch.float32, 50), (4, torch.float16, 1000)],
)
def test_sums_are_those_in_rank_order_in_fp32(world_size, dtype, chunk):
    staging = run_ranks(world_size, check_reduce, dtype, chunk, 60)
    assert staging == [DEPTH * (world_size - 1) * chunk * 4] * world_size
