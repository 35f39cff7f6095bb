"""Ranks as threads of one process: the exchange itself, with an all-to-all that only passes tensors on.

`together(P, function, *arguments)` calls `function(rank, *arguments of the rank)` on every one of them.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist


class Meeting:
    """A group: where its ranks meet and lay out what they have for each other."""

    def __init__(self, P):
        self.barrier = threading.Barrier(P, timeout=20)
        self.given = [None] * P


class Virtual(threading.local):
    rank = None


here = Virtual()


def all_to_all_single(arrived, sent, receives=None, sends=None, *, group):
    """Every rank cuts by its own sizes, which must fit each other's, or into equal parts."""
    P = len(group.given)
    receives, sends = receives or [len(arrived) // P] * P, sends or [len(sent) // P] * P
    group.given[here.rank] = sent.split(sends)
    group.barrier.wait()
    blocks = [given[here.rank] for given in group.given]
    group.barrier.wait()
    assert [len(block) for block in blocks] == receives
    torch.cat(blocks, out=arrived)


def together(P, function, *arguments):
    """The results, by rank; `arguments` are lists, by rank."""

    def run(rank):
        here.rank = rank
        return function(rank, *(argument[rank] for argument in arguments))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(P) as pool:
        patch.setattr(dist, "all_to_all_single", all_to_all_single)
        return [future.result() for future in [pool.submit(run, rank) for rank in range(P)]]
