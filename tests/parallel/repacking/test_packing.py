"""The fused kernels, here in Triton's interpreter, do what the slices do."""

import os
import subprocess
import sys

import pytest
import torch

from parallel.repacking.heads import HeadMap
from parallel.repacking.packing import num_columns, pack_by_slices, unpack_by_slices

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASES = [(1, 6, 2, 4, 8), (70, 6, 6, 4, 16), (5, 7, 3, 2, 80), (0, 4, 1, 4, 8), (40, 12, 1, 8, 128), (3, 3, 1, 8, 4)]  # fmt: skip
"""Rows, query and key/value heads, ranks, head dim."""


def cases(device):
    for case, (t, H, K, P, D) in enumerate(CASES):
        generator = torch.Generator().manual_seed(case)
        heads, dtype = HeadMap(H, K, P), DTYPES[case % len(DTYPES)]
        for blocks, counts in ((heads.qkv_blocks, (H, K, K)), (heads.q_blocks, (H,))):
            # As layers have them: (heads, rows, D) in memory, or parts of one projection.
            parts = [
                torch.randn(n, t, D, generator=generator).to(device, dtype).transpose(0, 1)
                for n in counts
            ]
            wide = torch.cat(parts, 1).split(list(counts), dim=1)
            yield parts, blocks, t, D
            yield wide, blocks, t, D


def compare(device):
    """Bit for bit; sums of heads that several ranks had, too."""
    from parallel.repacking.packing_triton import pack_on_device, unpack_on_device

    for parts, blocks, t, D in cases(device):
        dtype = parts[0].dtype
        buffer = pack_by_slices([part.cpu() for part in parts], blocks)
        assert torch.equal(pack_on_device(parts, blocks).cpu(), buffer)
        given = torch.randn(t * num_columns(blocks) * D, dtype=torch.float64).to(dtype)
        expected = unpack_by_slices(given, blocks, t, D)
        for got, whole in zip(
            unpack_on_device(given.to(device), blocks, t, D), expected, strict=True
        ):
            if device == "cpu" and dtype == torch.bfloat16:  # the interpreter truncates
                torch.testing.assert_close(got, whole, rtol=2**-7, atol=0)
                continue
            assert torch.equal(got.cpu(), whole), (blocks, t, D, dtype)


@pytest.mark.slow
def test_the_kernels_equal_the_slices_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.parallel.repacking.test_packing import *; compare('cpu')"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_equal_the_slices_on_the_gpu():
    compare("cuda")


def test_slices_follow_the_places_that_the_head_map_tells():
    """`HeadMap.sent` says the same as its blocks."""
    for parts, blocks, t, D in cases("cpu"):
        heads = HeadMap(parts[0].shape[1], parts[1].shape[1] if len(parts) > 1 else 1, len(blocks))
        sent, widths = (
            (heads.sent(), heads.qkv_per_rank) if len(parts) > 1
            else (range(heads.num_q), heads.q_per_rank)
        )  # fmt: skip
        columns = torch.cat(list(parts), 1)[:, torch.as_tensor(list(sent))]
        expected = [block.reshape(-1) for block in columns.split([int(n) for n in widths], dim=1)]
        assert torch.equal(pack_by_slices(parts, blocks), torch.cat(expected))
        assert torch.equal(
            unpack_by_slices(torch.cat(expected), blocks, t, D)[0], parts[0].contiguous()
        )
