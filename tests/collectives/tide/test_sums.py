"""Sums in a fixed order: the kernel, here in Triton's interpreter, does what the operations do."""

import os
import subprocess
import sys

import pytest
import torch

from collectives.tide.addresses import UNKNOWN, Table
from collectives.tide.sums import Sum, add_up

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(parts, dtype, out, device="cpu"):
    """Sums of several sizes, one of them a column of blocks."""
    generator = torch.Generator().manual_seed(parts)
    sums, old = [], []
    for number, (rows, width) in enumerate([(1, 5000), (1, 1), (7, 33), (1, 16384), (1, 40000)]):
        wide = torch.randn(parts, rows, 2 * width, generator=generator).to(device, dtype)
        total = torch.full((rows * width,), float(number), dtype=out, device=device)
        sums.append(Sum([part[:, :width] for part in wide], total))
        old.append(total.clone())
    return sums, old


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_sums_are_right_to_fp32(parts, dtype, out, accumulate):
    sums, old = make(parts, dtype, out)
    add_up(sums, torch.empty(50000), divide=3.0, accumulate=accumulate)
    for each, before in zip(sums, old, strict=True):
        exact = sum(part.double() for part in each.parts).reshape(-1) / 3
        exact = exact + before.double() if accumulate else exact
        tolerance = 2e-6 if out == torch.float32 else 2e-2
        torch.testing.assert_close(each.total.double(), exact, rtol=tolerance, atol=tolerance)


def compare(device):
    """The kernel beside the reference, bit for bit where the divisor is a power of two."""
    from collectives.tide import sums as reference
    from collectives.tide.sums_triton import add_up_on_device

    for parts in (1, 2, 5):
        for dtype in DTYPES:
            for out, accumulate, divide in [
                (torch.float32, False, 2.0), (torch.float32, True, 8.0), (torch.bfloat16, False, 1.0),
            ]:  # fmt: skip
                expected, _ = make(parts, dtype, out)  # torch divides otherwise on a GPU
                got, _ = make(parts, dtype, out, device)
                for each in expected:
                    scratch = torch.empty(50000)
                    reference._add_up(each, scratch, divide, accumulate)
                add_up_on_device(got, divide=divide, accumulate=accumulate)
                for a, b in zip(got, expected, strict=True):
                    if device == "cpu" and out == torch.bfloat16:  # the interpreter truncates
                        torch.testing.assert_close(a.total, b.total, rtol=2**-7, atol=0)
                        continue
                    assert torch.equal(a.total.cpu(), b.total), (parts, dtype, out, accumulate)


def check_tables(device):
    """Sums of runs of two tensors, some of whose addresses come with the call."""
    for dtype, out, accumulate in [
        (torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.float32, True),
    ]:  # fmt: skip
        runs = [(0, 3, 5000, 10), (1, 0, 1, 0), (1, 16, 30000, 2)]  # tensor, begin, numel, target
        staged = torch.randn(40000, device=device).to(dtype)
        rows = [[UNKNOWN, n, staged[begin:].data_ptr(), UNKNOWN] for _, begin, n, _ in runs]
        tensors, begins, _, targets = zip(*runs, strict=True)
        table = Table.of(rows, tensors, begins, 1, targets)
        for _ in range(2):  # addresses change, the table does not
            given = [torch.randn(40000, device=device).to(dtype) for _ in range(2)]
            got = [torch.ones(40000, dtype=out, device=device) for _ in range(2)]
            expected = [each.clone() for each in got]
            for tensor, begin, n, target in runs:
                total = staged[begin : begin + n].float() + given[tensor][begin : begin + n].float()
                where = expected[tensor][target : target + n]
                where.copy_(total / 2 + (where.float() if accumulate else 0))
            table.add_up(given, got, out, divide=2.0, accumulate=accumulate)
            for a, b in zip(got, expected, strict=True):
                tolerance = 2**-7 if device == "cpu" and out == torch.bfloat16 else 0
                torch.testing.assert_close(a, b, rtol=tolerance, atol=0)


@pytest.mark.slow
def test_the_kernel_equals_the_reference_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.collectives.tide.test_sums import *; compare('cpu'); check_tables('cpu')"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_equals_the_reference_on_the_gpu():
    compare("cuda")
    check_tables("cuda")
