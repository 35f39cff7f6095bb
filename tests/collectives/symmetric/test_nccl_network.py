"""The network of GPUs over an emulation of NCCL: ranks are threads, signals are counters.

What it shows is that rails and crossings ask no more of signals than NCCL gives: a number of arrivals
for each peer and index. Streams and network cards it does not show: `pytest -m gpu` does the former.
"""

import ctypes
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.topology import Topology

TIMEOUT = 20


class World:
    """What all ranks share: signals that have arrived and memory that is registered."""

    def __init__(self, size):
        self.size, self.changed = size, threading.Condition()
        self.arrived, self.windows = Counter(), {}


class Communicator:
    """As much of nccl4py's as is used."""

    host_rma_support = True

    def __init__(self, world, rank):
        self.world, self.rank, self.registered = world, rank, 0

    def register_window(self, memory, flag):
        number = self.registered
        self.registered += 1
        self.world.windows[self.rank, number] = memory
        return SimpleNamespace(number=number, close=lambda: None)

    def put_signal(self, source, peer, window, offset, index, *, stream):
        with self.world.changed:
            self.world.changed.wait_for(
                lambda: (peer, window.number) in self.world.windows, TIMEOUT
            )
        target = self.world.windows[peer, window.number]
        assert source.dtype == torch.uint8
        assert source.is_contiguous()
        assert 0 <= offset <= offset + source.numel() <= target.numel()
        ctypes.memmove(target.data_ptr() + offset, source.data_ptr(), source.numel())
        self.signal(peer, index, stream=stream)

    def signal(self, peer, index, *, stream):
        with self.world.changed:
            self.world.arrived[peer, self.rank, index] += 1
            self.world.changed.notify_all()

    def wait_signal(self, desc, *, stream):
        key = (self.rank, desc.peer, desc.signal_index)
        with self.world.changed:
            assert self.world.changed.wait_for(lambda: self.world.arrived[key] > 0, TIMEOUT), key
            self.world.arrived[key] -= 1

    def destroy(self):
        pass


@dataclass
class WaitSignalDesc:
    peer: int
    signal_index: int = 0


class Mark:
    def hold(self, stream):
        pass

    def has_passed(self):
        return True


@pytest.fixture(scope="module")
def network_of():
    """A function that links a rank of a world."""
    core = ModuleType("nccl.core")
    core.WaitSignalDesc, core.WindowFlag = WaitSignalDesc, SimpleNamespace(COLL_SYMMETRIC=1)
    package = ModuleType("nccl")
    package.core = core
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nccl", package)
        patch.setitem(sys.modules, "nccl.core", core)
        for name in ("nccl_network", "nccl_communicator"):
            patch.delitem(sys.modules, f"collectives.symmetric.{name}", raising=False)
        from collectives.symmetric import nccl_network

        patch.setattr(nccl_network.cuda, "Mark", Mark)
        patch.setattr(nccl_network, "current_raw_stream", lambda device: 0)
        patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=1))
        patch.setattr(nccl_network.dist, "get_global_rank", lambda group, member: member)

        def link(world, rank):
            group = SimpleNamespace(rank=lambda: rank, world=world)
            return nccl_network.NcclNetwork(
                group, list(range(world.size)), torch.device("cuda", 0), TIMEOUT, print
            )

        patch.setattr(
            nccl_network,
            "make_communicator",
            lambda group, members, num_rma_sig: Communicator(group.world, group.rank()),
        )
        yield link
        for name in ("nccl_network", "nccl_communicator"):
            sys.modules.pop(f"collectives.symmetric.{name}", None)


class Own:
    """Memory of this rank alone, as on a node of one."""

    rank = 0

    def allocate(self, nbytes):
        memory = torch.zeros(nbytes, dtype=torch.uint8)

        def tensor(rank, offset, numel, dtype):
            return memory[offset : offset + numel * dtype.itemsize].view(dtype)

        return SimpleNamespace(nbytes=nbytes, tensor=tensor)


def on_ranks(size, action):
    """`action(rank)` on threads; what each returned."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(action, range(size)))


@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(2, 5), depth=st.integers(1, 3), laps=st.integers(1, 3))
def test_crossings_bring_what_was_sent(network_of, nodes, depth, laps):
    from collectives.symmetric.fabric import Fabric
    from collectives.tide.crossing import Crossing

    world = World(nodes)

    def run(node):
        network = network_of(world, node)
        crossing = Crossing(Fabric(Topology(nodes, 1, node, 0), Own(), network), 8, depth, 3)
        seen = []
        for turn in range(laps * (nodes - 1)):
            step = 1 + turn % (nodes - 1)
            crossing.outgoing(2, torch.float32).copy_(torch.tensor([node, turn]))
            seen.append((step, crossing.exchange(step, 2, torch.float32).tolist()))
            crossing.acknowledge()
        return seen

    for node, seen in enumerate(on_ranks(nodes, run)):
        assert seen == [(s, [(node - s) % nodes, turn]) for turn, (s, _) in enumerate(seen)]


@settings(max_examples=20, deadline=None)
@given(
    in_flight=st.integers(1, 3), puts=st.integers(1, 7), rows=st.integers(1, 3),
    width=st.integers(0, 3), gap=st.integers(0, 2),
)  # fmt: skip
def test_rails_place_rows_and_give_credit(network_of, in_flight, puts, rows, width, gap):
    from collectives.tide.rail import Rail

    world, pitch = World(2), width + gap
    extent = rows * pitch + 1

    def run(rank):
        network = network_of(world, rank)
        memory = torch.full((puts * extent * 4 * 2,), 255, dtype=torch.uint8)
        half = puts * extent * 4
        region, rail = network.register(memory), Rail(network, 0, in_flight)
        numbers = memory[:half].view(torch.int32)
        for number in range(puts):
            source = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
            source += 100 * number + 1000 * rank
            rail.put(source, region, half + number * extent * 4, 1 - rank, pitch)
            rail.take(1 - rank)
        rail.finish(1 - rank)
        return numbers.numel(), memory[half:].view(torch.int32).view(puts, extent)

    for rank, (_, landed) in enumerate(on_ranks(2, run)):
        for number in range(puts):
            expected = torch.full((extent,), -1, dtype=torch.int32)
            for row in range(rows):
                values = torch.arange(row * width, (row + 1) * width) + 100 * number
                at = row * pitch
                expected[at : at + width] = (values + 1000 * (1 - rank)).int()
            assert torch.equal(landed[number], expected)
    assert not any(count for (_, _, index), count in world.arrived.items() if index)
