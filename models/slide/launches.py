"""When kernels of ours stand for modules and tensors, and what one program of them works out.

The kernels are in the files `*_triton.py`, which are imported only where one of these functions says so:
Triton comes with CUDA builds of torch. They pay where rows are few, so that launches are what costs; for
many rows there is cuBLAS. Elsewhere tensors do the same.

W beams, D hidden size, V rows of a table, E head size, P places of the history or of a list
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = (torch.bfloat16, torch.float32)
WIDTHS = (32, 64, 128, 256, 512)
"""Hidden sizes whose rows one program's registers hold."""
HEAD_SIZES = (16, 32, 64, 128)
MOST_ROWS = 1024
"""That kernels of a whole layer take."""
KEYS = 2048
"""Numbers of keys, P * E a user and head, that the registers of a warp hold."""
EPS = torch.finfo(torch.float32).eps
"""What torch adds to mean squares in bf16, too, if a module does not say."""
EARLY = False
"""Whether a kernel is set up while the one before it runs: programmatic dependent launch, of Hopper."""


class Tiles(NamedTuple):
    """What one program works out."""

    users: int
    """With whose tokens it attends."""
    rows: int
    """Of a product."""
    warps: int
    codes: int
    """Of one level."""
    narrow: int
    """Columns of what a layer adds at last."""
    fetched: int
    """Bytes of weights, at a time."""

    def chunk(self, across: int, like: Tensor, most: int) -> int:
        """How many rows or columns of weights are fetched at a time, `across` numbers each."""
        return max(16, min(most, self.fetched // (across * like.element_size())))


def tiles(rows: int) -> Tiles:
    """Few rows are shared among many programs, since each fetches its weights alone."""
    if rows <= 128:
        return Tiles(users=4, rows=16, warps=4, codes=32, narrow=16, fetched=32 * 1024)
    return Tiles(users=8, rows=32, warps=8, codes=32, narrow=32, fetched=32 * 1024)


def options(like: Tensor, warps: int) -> dict[str, Any]:
    """How a kernel starts."""
    early = EARLY and like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": early, "num_warps": warps}


def attend(like: Tensor, head_size: int) -> bool:
    """Whether a kernel does what is between two projections of attention, for numbers like these."""
    return _readable(like) and head_size in HEAD_SIZES


def finish(x_BWD: Tensor) -> bool:
    """Whether kernels do what follows a layer's attention."""
    rows, D = x_BWD.shape[0] * x_BWD.shape[1], x_BWD.shape[2]
    return _readable(x_BWD) and D in WIDTHS and rows <= MOST_ROWS


def begin(x_BWD: Tensor, head_size: int, places: int) -> bool:
    """Whether a kernel does all up to there as well: of lists, which have one beam."""
    fits = places * head_size <= KEYS * tiles(len(x_BWD)).warps
    return fits and x_BWD.shape[1] == 1 and attend(x_BWD, head_size) and finish(x_BWD)


def choose(table_VD: Tensor) -> bool:
    """Whether kernels choose the items of a model with heads and these vectors."""
    return _readable(table_VD) and table_VD.shape[1] in WIDTHS


def _readable(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KINDS and not torch.is_grad_enabled()
