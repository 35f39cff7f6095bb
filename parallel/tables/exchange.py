"""Numbers go to the ranks that have their rows, and rows come back: torchrec's row-wise distribution.

    ids_U, unlike each other     to the ranks of their rows            RwSparseFeaturesDist
    rows_AD of all that arrived  from this rank's rows, `own_rD`
    rows_UD                      to where they were asked for          RwSequenceEmbeddingDist

The backward pass takes gradients the other way; torchrec divides them by the number of ranks, which is
FSDP2's average. Each number is asked for once by each rank, however often it is looked up: padding would
all go to the first rank. Rows travel in the compute type; gradients of repeated rows are added up before
and after the way in fp32 at least, and those that arrive go into rows of the parameter's type.

The only place that knows torchrec. It is imported when the first table is divided; `check` says whether
it is as it was tested, and `tests/parallel/tables` fails loudly when it is not.

Legend: U numbers that this rank asks for, A those that it is asked for, r its rows, D their size, V rows
of the whole table.
"""

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.waits import waiting

TESTED = "1.8"
"""Of torchrec, and of fbgemm_gpu, whose kernels it calls."""
INSTALL = (
    f"pip install --no-deps 'torchrec=={TESTED}.*' 'fbgemm-gpu-cpu=={TESTED}.*' (for GPUs fbgemm-gpu), "
    "and pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
)
KEY = "rows"
"""What torchrec calls the only feature of a table."""


@dataclass(eq=False)
class TableRanks:
    """The ranks that divide a table, all that average gradients, as one of them sees it."""

    size: int
    group: dist.ProcessGroup | None = None
    """None: there is none, and nothing can travel."""
    foreseen: float = 0.0
    """Bytes that passes on meta would have sent to other ranks, if all numbers were different and evenly
    spread."""


@cache
def problem(device_type: str) -> str | None:
    """Why torchrec cannot look rows up on such devices, and what helps; None: it can.

    Imports it, which takes seconds.
    """
    if importlib.util.find_spec("torchrec") is None:
        return f"torchrec is not installed: {INSTALL}"
    try:
        check()
        import fbgemm_gpu
    except (ImportError, OSError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        return f"torchrec cannot be used ({why}): {INSTALL}"
    if device_type != "cpu" and fbgemm_gpu.__variant__ == "cpu":
        return "fbgemm_gpu is a build for CPUs: install fbgemm-gpu instead of fbgemm-gpu-cpu"
    return None


def check() -> None:
    """Raise `RuntimeError` if torchrec is not as it was tested."""
    try:
        found = version("torchrec")
    except PackageNotFoundError:
        found = "of no known version"
    parts = _parts()
    for part, expected in (
        (parts.ids, ["pg", "num_features", "feature_hash_sizes", "device", "is_sequence"]),
        (parts.rows, ["pg", "num_features", "device"]),
        (parts.rows.forward, ["local_embs", "sharding_ctx"]),
        (parts.context, ["input_splits", "output_splits", "sparse_features_recat",
                         "batch_size_per_rank", "unbucketize_permute_tensor",
                         "lengths_after_input_dist"]),
        (parts.arrived, ["input_splits", "output_splits", "labels", "stride_per_rank"]),
    ):  # fmt: skip
        names = list(inspect.signature(part).parameters)
        if missing := [name for name in expected if name not in names]:
            raise RuntimeError(
                f"torchrec {found} has changed {part.__qualname__}, which lacks {', '.join(missing)}: "
                f"springtide was tested with torchrec {TESTED}"
            )
    if not parts.divides_gradients():
        raise RuntimeError("torchrec was told not to divide gradients (set_gradient_division)")


@dataclass(frozen=True)
class _Parts:
    """What is used of torchrec."""

    ids: Any
    rows: Any
    context: Any
    arrived: Any
    features: Any
    divides_gradients: Any


@cache
def _parts() -> _Parts:
    from torchrec.distributed.comm_ops import get_gradient_division
    from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
    from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
    from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
    from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return _Parts(
        RwSparseFeaturesDist,
        RwSequenceEmbeddingDist,
        SequenceShardingContext,
        KJTAllToAllTensorsAwaitable,
        KeyedJaggedTensor,
        get_gradient_division,
    )


class Lookup:
    """Rows of one table that ranks divide. Every rank of the group makes the same calls."""

    def __init__(
        self, num_rows: int, ranks: TableRanks, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """`dtype`: rows travel in it; None: in the parameter's."""
        self.ranks, self.dtype = ranks, dtype
        if ranks.group is not None:
            parts = _parts()
            self.ids = parts.ids(ranks.group, 1, [num_rows], device=device, is_sequence=True)
            self.rows = parts.rows(ranks.group, 1, device)

    def __call__(self, ids: Tensor, own_rD: Tensor) -> Tensor:
        """The rows with these numbers, of any shape, (..., D); `own` are those of this rank."""
        dtype = self.dtype or own_rD.dtype
        if ids.device.type == "meta":
            rows_UD, place = self._foresee(ids, own_rD, dtype), ids
        else:
            ids_U, place = ids.unique(return_inverse=True)  # the host waits here
            rows_UD = self._fetch(ids_U, own_rD, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return nn.functional.embedding(place, rows_UD.to(wide)).to(dtype)

    def _fetch(self, ids_U: Tensor, own_rD: Tensor, dtype: torch.dtype) -> Tensor:
        parts = _parts()
        number = torch.tensor([len(ids_U)], device=ids_U.device)
        with waiting():  # for how many come from each rank, and then for them
            arriving = self.ids(parts.features(keys=[KEY], values=ids_U, lengths=number)).wait()
            asked = arriving.wait()
        context = parts.context(
            input_splits=arriving._input_splits["values"],
            output_splits=arriving._output_splits["values"],
            sparse_features_recat=arriving._recat,
            batch_size_per_rank=arriving._stride_per_rank,
            unbucketize_permute_tensor=self.ids.unbucketize_permute_tensor,
            lengths_after_input_dist=asked.lengths().view(1, -1),
        )
        rows_AD = nn.functional.embedding(asked.values(), own_rD).to(dtype)
        with waiting():
            rows_UD: Tensor = self.rows(rows_AD, context).wait()
        return rows_UD

    def _foresee(self, ids: Tensor, own_rD: Tensor, dtype: torch.dtype) -> Tensor:
        """On meta: every rank asks for as many as it is asked for."""
        rows_AD = nn.functional.embedding(ids.flatten(), own_rD).to(dtype)
        away = 1 - 1 / self.ranks.size
        self.ranks.foreseen += away * (ids.numel() * ids.element_size() + 2 * rows_AD.nbytes)
        return rows_AD.clone()
