"""The matrix of `test_equality.py` on GPUs: `pytest -m gpu`."""

import os
import traceback

import pytest
import torch

from tests.parallel.tide.test_equality import TWO_RANKS
from tests.parallel.tide.training import both
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


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


def test_two_gpus_equal_torch(monkeypatch):
    monkeypatch.setitem(os.environ, "SPRINGTIDE_TEST_DEVICE", "cuda")
    names = [name for name, case in TWO_RANKS.items() if case.node_size == 8]
    for failed in run_ranks(2, every_case, names, timeout=280):
        assert failed == {}, "\n".join(f"{n}: {t}" for n, t in failed.items())
