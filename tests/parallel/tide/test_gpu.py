"""The matrix of `test_equality.py` on GPUs, and what only GPUs can get wrong: `pytest -m gpu`."""

import gc
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist

from collectives.nccl import unusable
from parallel.tide.room import SymmetricMemoryError
from tests.parallel.tide.test_equality import TWO_RANKS
from tests.parallel.tide.training import Case, batch, both, build, loss_of
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
PROBLEM = unusable() if GPUS else "no GPU"
TRANSPORTS = [
    "symm_mem",
    pytest.param("nccl", marks=pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))),
]


@pytest.fixture(params=TRANSPORTS, autouse=True)
def transport(request, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", "cuda")
    monkeypatch.setenv("SPRINGTIDE_TEST_TRANSPORT", request.param)
    return request.param


def every_case(names):
    """All in one process, since starting one takes longer than training; what failed, by name."""
    failed = {}
    for name in names:
        try:
            both(TWO_RANKS[name], "stock")
        except (AssertionError, RuntimeError):  # of numbers that differ, of a device or a transport
            failed[name] = traceback.format_exc()
            if "CUDA error" in failed[name]:
                break
    return failed


def test_two_gpus_equal_torch():
    names = [name for name, case in TWO_RANKS.items() if case.node_size == 8 and not case.slow]
    for failed in run_ranks(2, every_case, names, timeout=280):
        assert failed == {}, "\n".join(f"{n}: {t}" for n, t in failed.items())


def one_step(case, model):
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss_of(case, model, batch(case, generator), 0).backward()


def check_silence(transport):
    """Rank 1 comes late to its second step; rank 0, whose streams wait for it, must be told."""
    case = Case(tide={"timeout": 3})
    model = build(case, "tide")
    told, errors = threading.Event(), []

    def give_up(error):
        errors.append(str(error))
        told.set()

    for pool in model.tide.pools:
        pool.give_up = give_up
    one_step(case, model)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(8)
    one_step(case, model)
    if dist.get_rank() == 0:
        assert told.wait(20)
        assert "rank 1 did not signal rank 0 within 3 s (" in errors[0]
    torch.cuda.synchronize()
    assert len(errors) == (dist.get_rank() == 0)


def test_a_silent_rank_is_named(transport):
    run_ranks(2, check_silence, transport, timeout=120)


def cycle(name, times):
    """What the device's free memory shrinks by, while models come, train and go."""
    free = []
    for _ in range(times):
        case = Case()
        model = build(case, name)
        one_step(case, model)
        torch.cuda.synchronize()
        dist.barrier()
        if name == "tide":
            model.tide.close()
        del model
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
    return free[1] - free[-1]


def check_cycles(transport):
    """Ten models on torch's collectives, then ten on TIDE, each after two that warm up."""
    assert transport
    return cycle("stock", 12), cycle("tide", 12), threading.active_count()


def test_models_that_come_and_go_leave_nothing_behind(transport):
    for stock, tide, threads in run_ranks(2, check_cycles, transport, timeout=200):
        assert tide - stock < 2**24, (stock, tide)
        assert threads < 20


def check_room(transport):
    case = Case()
    build(case, "stock")(
        input_ids=torch.ones(1, 2, dtype=torch.int64, device="cuda")
    )  # streams etc.
    model = build(case, "tide")
    free = torch.cuda.mem_get_info()[0]
    if dist.get_rank() == 1:
        hog = torch.empty(free - 120 * 2**20, dtype=torch.uint8, device="cuda")
        assert hog.numel()
    with pytest.raises(SymmetricMemoryError, match="rank 1 has 0.1.* GiB left"):
        one_step(case, model)
    dist.barrier()
    return transport


def test_too_little_memory_is_an_error_on_every_rank(transport):
    run_ranks(2, check_room, transport, timeout=120)
