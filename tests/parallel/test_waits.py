"""Every wait for FSDP2's collectives is reported, on torch's collectives and on TIDE; fails loudly
when a new torch changes what `parallel.waits` relies on."""

import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from parallel.fsdp import set_last_micro_batch
from parallel.norm import global_norm
from parallel.tide import use_tide
from parallel.waits import changed_names, report_waits, waiting
from tests.ranks import run_ranks
from trainer.watch.clock import Clock, HostMarks, make_clock


def test_private_functions_look_as_they_did():
    assert changed_names() == []


def test_another_fsdp2_is_not_measured(monkeypatch):
    group = _fsdp_param_group.FSDPParamGroup
    monkeypatch.setattr(group, "finalize_backward", lambda self, more: None)
    if not hasattr(group.unshard, "reports_waits"):  # nobody has measured in this process yet
        assert report_waits(None) is False
    assert changed_names() == ["finalize_backward"]
    monkeypatch.delattr(group, "unshard")
    assert changed_names() == ["unshard", "finalize_backward"]


def test_nobody_measures_and_nothing_happens():
    with waiting():
        pass


def check_waits(tide):
    """Spans of two micro-batches and a norm: how many at what depth, and whether all have ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if tide:
        assert not use_tide(model, node_size=2).stayed
    counts, depth = Counter(), []

    @contextmanager
    def span():
        depth.append(None)
        counts[part] += 1
        yield
        depth.pop()

    assert report_waits(span)
    for part in ("kept", "reduced"):
        set_last_micro_batch(model, last=part == "reduced", every=False)
        model(torch.ones(2, 8)).sum().backward()
    part = "norm"
    global_norm([p.grad for p in model.parameters()], torch.zeros(1))
    report_waits(None)
    assert not depth
    before = counts.total()
    model(torch.ones(2, 8))
    assert counts.total() == before
    return counts["kept"], counts["reduced"], counts["norm"]


@pytest.mark.parametrize("tide", [False, True])
def test_gathers_reductions_and_the_norm_are_reported(tide):
    for kept, reduced, norm in run_ranks(2, check_waits, tide):
        assert kept > 0  # gathers
        assert reduced >= kept + 2  # and two layers that reduce, and the end of the backward pass
        assert norm == 1


def check_slow_peer():
    """A rank whose peer is late has waited for it, and the late one has not."""

    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    clock = Clock(HostMarks())
    report_waits(clock.communication)
    dist.barrier()
    with clock("forward"):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        model(torch.ones(2, 8))
    report_waits(None)
    return clock.read()


def test_who_waits_for_a_late_rank_has_communication_and_who_is_late_forward():
    early, late = run_ranks(2, check_slow_peer)
    assert early["communication"] > late["communication"]
    assert late["forward"] > early["forward"]


def check_slow_gpu():
    """The same where the host only queues: rank 1's GPU is busy before it gathers."""
    device = torch.device("cuda", dist.get_rank())
    model = nn.Sequential(nn.Linear(512, 512)).to(device)
    fully_shard(model)
    x = torch.ones(8, 512, device=device)
    model(x).sum().backward()
    clock = make_clock(device)
    report_waits(clock.communication)
    dist.barrier()
    torch.cuda.set_sync_debug_mode("error")  # no mark waits for the device
    with clock("forward"):
        if dist.get_rank() == 1:
            torch.cuda._sleep(10**9)
        y = model(x)
    with clock("backward"):
        y.sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    report_waits(None)
    return clock.read()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_waits_for_another_has_communication(monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", "cuda")
    early, late = run_ranks(2, check_slow_gpu)
    assert early["communication"] > 10 * early["forward"]
    assert late["forward"] > 10 * late["communication"]
