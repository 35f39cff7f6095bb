"""Transports that take their time and do things as late as they may, so that ranks meet in any order."""

import queue
import random
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

import torch
import torch.distributed as dist

from collectives.symmetric.fabric import Fabric
from collectives.symmetric.p2p import PointToPoint
from collectives.symmetric.shm import SharedMemory
from collectives.symmetric.transport import PeerError
from collectives.topology import make_topology

DELAY = 0.002
"""Seconds at most that one operation is held up."""


def pause(source, chance=0.2):
    if source.random() < chance:
        time.sleep(source.random() * DELAY)


class Deferred(SharedMemory):
    """Shared memory whose puts and signals happen later, in another thread, as on a copy stream.

    Only order is kept. A source that is written or freed too soon therefore arrives wrong.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._random, self._todo, self._errors = random.Random(self.rank), queue.Queue(), []
        self._lasting = []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            action, arguments = self._todo.get()
            pause(self._random)
            try:
                action(*arguments)
            except (AssertionError, PeerError) as error:  # whoever waits next raises the former
                self._errors.append(error)
            self._todo.task_done()

    def put(self, source, *place):
        """Symmetric memory stays; any other source is only looked up again when its turn comes."""
        if place[2] == self.rank:
            super().put(source, *place)
            return
        at = source.data_ptr()
        lasting = any(begin <= at < begin + size for begin, size in self._lasting)
        storage = source.untyped_storage()
        kept = storage if lasting else weakref.ref(storage)
        view = (source.storage_offset(), source.shape, source.stride(), source.dtype)
        self._todo.put((self._put_late, (kept, lasting, view, place)))

    def _put_late(self, kept, lasting, view, place):
        storage = kept if lasting else kept()
        if storage is None:
            raise AssertionError("a source was freed before it was read")
        offset, shape, stride, dtype = view
        source = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        super().put(source, *place)

    def signal(self, *arguments):
        self._todo.put((super().signal, arguments))

    def wait(self, *arguments):
        pause(self._random)
        if self._errors and isinstance(self._errors[0], AssertionError):
            raise self._errors[0]
        return super().wait(*arguments)

    def flush(self):
        self._todo.join()

    def allocate(self, nbytes):
        self.flush()
        region = super().allocate(nbytes)
        self._lasting.append((region.tensor(self.rank, 0, nbytes, torch.uint8).data_ptr(), nbytes))
        return region


class Throttled(PointToPoint):
    """A network that is slow and serves peers in any order, though each of them in order."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._random = random.Random(100 + self.rank)
        self._queues = {peer: deque() for peer in range(self.world_size)}
        self._more = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            with self._more:
                self._more.wait_for(lambda: any(self._queues.values()))
                peer = self._random.choice([p for p, q in self._queues.items() if q])
                action, arguments = self._queues[peer][0]
            pause(self._random, 0.5)
            with suppress(PeerError):  # the peer is gone: whoever waits finds out by itself
                action(*arguments)
            with self._more:
                self._queues[peer].popleft()
                self._more.notify_all()

    def _later(self, peer, action, arguments):
        with self._more:
            self._queues[peer].append((action, arguments))
            self._more.notify_all()

    def put(self, source, region, offset, peer, pitch=None):
        self._later(peer, super().put, (source, region, offset, peer, pitch))

    def signal(self, peer, channel, value):
        self._later(peer, super().signal, (peer, channel, value))

    def flush(self):
        with self._more:
            self._more.wait_for(lambda: not any(self._queues.values()))
            super().flush()


def connect(group=None, node_size=8, timeout=20.0, multicast=False, *_):
    """As `collectives.symmetric.fabric.connect`, out of slow parts."""
    group = group or dist.group.WORLD
    topology = make_topology(dist.get_process_group_ranks(group), group.rank(), node_size)
    local = Deferred(group, topology.neighbours, timeout, multicast)
    single = topology.num_nodes == 1
    network = None if single else Throttled(group, topology.rail, timeout)
    return Fabric(topology, local, network)


def finish(fabric):
    """Everything is sent, by everybody, before anybody leaves."""
    fabric.local.flush()
    if fabric.network is not None:
        fabric.network.flush()
    dist.barrier()
    fabric.close()
