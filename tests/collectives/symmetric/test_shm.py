"""Shared memory between processes: bytes, flags, dead peers, and nothing left behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import PeerError
from tests.ranks import run_ranks


def check_put():
    memory = SharedMemory(timeout=20)
    rank, size = memory.rank, memory.world_size
    region = memory.allocate(1000 * size)
    own = region.tensor(rank, 0, 250 * size, torch.float32)
    own.fill_(-1)
    for peer in range(size):
        memory.signal(peer, 0, 1)
    for peer in range(size):
        memory.wait(peer, 0, 1)
    block = torch.full((250,), float(rank))
    for peer in range(size):
        memory.put(block, region, 1000 * rank, peer)
        memory.signal(peer, 1, 1)
    for peer in range(size):
        memory.wait(peer, 1, 1)
    got = own.view(size, 250)
    assert (got == torch.arange(size)[:, None]).all()
    dist.barrier()
    memory.close()
    assert (got == torch.arange(size)[:, None]).all()  # a tensor outlives its transport


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_rank_writes_into_every_other(world_size):
    run_ranks(world_size, check_put)


def check_stress(rounds):
    """Each round a rank overwrites its peers' block, but only once they have read the last one."""
    memory = SharedMemory(timeout=30)
    rank, size = memory.rank, memory.world_size
    numbers = 4096
    region = memory.allocate(8 * numbers * size)
    own = region.tensor(rank, 0, size * numbers, torch.int64).view(size, numbers)
    delays = random.Random(rank)
    peers = [peer for peer in range(size) if peer != rank]
    for turn in range(1, rounds + 1):
        source = torch.full((numbers,), turn * 1000 + rank)
        for peer in peers:
            memory.wait(peer, 1, turn - 1)  # it has read my block of the turn before
            memory.put(source, region, 8 * numbers * rank, peer)
            memory.signal(peer, 0, turn)
        if delays.random() < 0.05:
            time.sleep(delays.random() * 0.003)
        for peer in peers:
            memory.wait(peer, 0, turn)
            block = own[peer]
            assert block[0] == block[-1] == turn * 1000 + peer
            assert (block == block[0]).all()
            memory.signal(peer, 1, turn)
    dist.barrier()
    memory.close()


def test_thousands_of_rounds_with_delays_never_tear():
    run_ranks(3, check_stress, 2000)


def check_sizes_differ():
    memory = SharedMemory(timeout=10)
    try:
        memory.allocate(100 + memory.rank)
    except ValueError as error:
        return str(error)
    return "no error"


def test_regions_of_different_sizes_are_refused():
    messages = run_ranks(2, check_sizes_differ)
    assert messages[0] == "rank 1 allocated 101 bytes, this rank 100"
    assert messages[1] == "rank 0 allocated 100 bytes, this rank 101"


def check_dead_peer(how):
    memory = SharedMemory(timeout=3)
    memory.allocate(100)
    if memory.rank == 1:
        if how == "silent":
            time.sleep(6)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        memory.wait(1, 0, 1)
    except PeerError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0


@pytest.mark.parametrize(
    ("how", "message", "most"), [("killed", "rank 1 is gone", 1.0), ("silent", "rank 1", 4.5)]
)
def test_a_dead_or_silent_peer_is_named_in_time(how, message, most, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(2, report_dead_peer, how, tmp_path / "message")
    text, seconds = (tmp_path / "message").read_text().rsplit("|", 1)
    assert message in text
    assert float(seconds) < most


def report_dead_peer(how, file):
    """Rank 1 dies, so what rank 0 saw must be left in a file."""
    text, seconds = check_dead_peer(how)
    file.write_text(f"{text}|{seconds}")


def check_leaks():
    def held():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd")

    for cycle in range(11):
        if cycle == 1:  # the first one opens what the process keeps
            before = held()
        memory = SharedMemory(timeout=10)
        region = memory.allocate(5000)
        del region
        memory.close()
        dist.barrier()
    return before, held()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_ten_cycles_leak_nothing_and_shm_stays_empty():
    names = set(os.listdir("/dev/shm"))
    for before, after in run_ranks(2, check_leaks):
        assert after == before
    assert not {n for n in set(os.listdir("/dev/shm")) - names if "springtide" in n}


def check_waiting_costs_nothing():
    memory = SharedMemory(timeout=10)
    if memory.rank == 1:
        time.sleep(1.0)
        memory.signal(0, 0, 1)
        return 0.0
    before = time.process_time()
    memory.wait(1, 0, 1)
    return time.process_time() - before


def test_waiting_does_not_spin():
    assert run_ranks(2, check_waiting_costs_nothing)[0] < 0.1
