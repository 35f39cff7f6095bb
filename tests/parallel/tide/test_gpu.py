"""The matrix of `test_equality.py` on GPUs, and what only GPUs can get wrong: `pytest -m gpu`."""

import gc
import shutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.nccl import unusable
from parallel.tide.room import SymmetricMemoryError
from tests.parallel.tide.test_equality import BF16, TWO_NODES, TWO_RANKS
from tests.parallel.tide.training import Case, batch, both, build, loss_of
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
PROBLEM = unusable() if GPUS else "no GPU"
_installed = Path("/usr/local/cuda/bin/compute-sanitizer")
SANITIZER = shutil.which("compute-sanitizer") or (str(_installed) if _installed.exists() else None)
TRANSPORTS = [
    "symm_mem",
    pytest.param("nccl", marks=pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))),
]


@pytest.fixture(params=TRANSPORTS, autouse=True)
def transport(request, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", "cuda")
    monkeypatch.setenv("SPRINGTIDE_TEST_TRANSPORT", request.param)
    return request.param


WITHIN = {name: case for kind in TWO_RANKS.values() for name, case in kind.items() if not case.slow}


def every_case(names):
    """All in one process, since starting one takes longer than training; what failed, by name."""
    failed = {}
    for name in names:
        try:
            both((WITHIN | TWO_NODES)[name], "stock")
        except (AssertionError, RuntimeError):  # of numbers that differ, of a device or a transport
            failed[name] = traceback.format_exc()
            if "CUDA error" in failed[name]:
                break
    return failed


def test_two_gpus_equal_torch():
    for failed in run_ranks(2, every_case, list(WITHIN), timeout=280):
        assert failed == {}, "\n".join(f"{n}: {t}" for n, t in failed.items())


def test_gpus_as_nodes_of_their_own_equal_torch(transport):
    """Over NCCL's puts and signals, where copy engines stand for the network."""
    if transport != "nccl":
        pytest.skip("several nodes need NCCL")
    for failed in run_ranks(2, every_case, list(TWO_NODES), timeout=280):
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


def graphed(forward):
    """A forward function that is captured when it is first called, and replayed from then on."""
    made = {}

    def replay(x):
        if not made:
            made["x"] = x.clone()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                forward(made["x"])  # cuBLAS takes its workspace
            torch.cuda.synchronize()
            made["graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made["graph"], capture_error_mode="thread_local"):
                made["y"] = forward(made["x"])
        made["x"].copy_(x)
        made["graph"].replay()
        return made["y"].clone()

    return replay


def check_graphs():
    """Blocks whose kernels were captured once go on working while weights change: a parameter's
    gathered values are at the same address in every step."""
    case = Case("toy", parallel=BF16)
    model = build(case, "tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    plain = [block.forward for block in model.blocks]
    captured = [graphed(forward) for forward in plain]
    outputs = []
    for _ in range(4):
        one_step(case, model)
        optimizer.step()
        optimizer.zero_grad()
        x = batch(case, generator)
        with torch.no_grad():
            for forwards in (plain, captured):
                for block, forward in zip(model.blocks, forwards, strict=True):
                    block.forward = forward
                outputs.append(model(x))
        for block, forward in zip(model.blocks, plain, strict=True):
            block.forward = forward
        torch.testing.assert_close(outputs[-1], outputs[-2], rtol=0, atol=0)
    assert not torch.equal(outputs[-1], outputs[0])


def test_blocks_can_be_cuda_graphs():
    run_ranks(2, check_graphs, timeout=120)


@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer")
def test_compute_sanitizer_finds_nothing():
    """Every copy and kernel of a few steps stays inside its memory."""
    command = [
        SANITIZER, "--tool", "memcheck", "--report-api-errors", "no",  # NCCL asks for what may be absent
        "--target-processes", "all", "--error-exitcode", "9",
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "tests.parallel.tide.sanitized",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert said.count("losses") == 2, said
    assert "ERROR SUMMARY: 0 errors" in said
