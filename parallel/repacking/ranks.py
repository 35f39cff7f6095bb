"""The ranks of a run that share samples by plan, and where one of them is in a plan.

    ranks = PlannedRanks(size=32, node_size=8, max_parent=16, rank=5, groups=make_groups(16, "cpu"))
    parent, child = ranks.shards(plan)      # rows of the full layers' group, and of the others'

Ranks without a planner that share samples (Ulysses over a fixed number) are the same with a plan that is
always one parent without children of its own: `one_parent`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike

from parallel.mesh import widest_parent
from parallel.repacking.agree import check_same
from parallel.repacking.calibration import Calibration, load
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel, Memory
from parallel.repacking.exchange import Shards
from parallel.repacking.plan import NARROW, Child, Parent, Plan
from parallel.repacking.planner import Planner
from parallel.repacking.process_groups import Groups
from parallel.repacking.shape import ModelShape
from parallel.sequence import SequenceRanks
from parallel.waits import waiting


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """All ranks that share samples, as one of them sees them."""

    size: int
    rank: int = 0
    node_size: int = 8
    max_parent: int | None = 32
    """Ranks of a parent at most; None: no planner, all ranks are one group in all layers."""
    config: RepackingConfig = field(default_factory=RepackingConfig)
    recompute: bool = False
    """Layers are computed again in the backward pass, communication included."""
    dtype_bytes: int = 4
    """Of what travels."""
    device_type: str = "cpu"
    groups: Groups | None = None
    """None: there are none yet, and nothing can travel."""

    def __post_init__(self) -> None:
        if self.config.search_seconds is not None:
            raise ValueError(
                f"parallel.repacking.search_seconds={self.config.search_seconds}: every rank plans for "
                "itself, and a clock would have each end elsewhere: set "
                "parallel.repacking.search_seconds=null, and parallel.repacking.search_parents"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For data workers, which talk to nobody."""
        return {**self.__dict__, "groups": None}

    @property
    def calibration(self) -> Calibration:
        """As configured, or of the kind of device."""
        by_device = "h200" if self.device_type == "cuda" else "cpu"
        return load(self.config.calibration or by_device)

    def planner(self, shape: ModelShape) -> Planner | None:
        """For a model of this shape; None: plans are all alike.

        Raises `ValueError` for what cannot be.
        """
        if self.max_parent is None:
            return None
        limit = float("inf") if self.config.max_rows is None else float(self.config.max_rows)
        cost = CostModel(
            shape, self.calibration, node_size=self.node_size, memory=Memory(rows=limit)
        )
        widest = widest_parent(self.max_parent, self.size)
        return Planner(cost, self.size, widest, self.config)

    def shards(self, plan: Plan) -> tuple[Shards, Shards]:
        """This rank's place in its parent and in its child, which may be the same."""
        parent, child = plan.parent_of(self.rank), plan.child_of(self.rank)
        layout = plan.layout(parent)
        whole = Shards(layout, self.rank - parent.first_rank, self._group(parent))
        if child.width == parent.width:
            return whole, whole
        first = child.first_rank - parent.first_rank
        part = layout.part(first, first + child.width)
        return whole, Shards(part, self.rank - child.first_rank, self._group(child))

    def _group(self, block: Parent | Child) -> dist.ProcessGroup | None:
        return None if self.groups is None else self.groups[block.first_rank, block.width]

    def check(self, plan: Plan) -> None:
        """Raise `ValueError` on every rank unless all have the same plan: one small all-gather."""
        if self.max_parent is not None and dist.is_initialized():
            with waiting():
                check_same(plan)


def fixed(ranks: SequenceRanks) -> PlannedRanks:
    """Ranks that share all samples without a planner."""
    groups: Groups | None = None if ranks.group is None else {(0, ranks.size): ranks.group}
    return PlannedRanks(
        size=ranks.size, rank=ranks.rank, node_size=ranks.size, max_parent=None, groups=groups
    )


def one_parent(lengths: ArrayLike, size: int) -> Plan:
    """All samples in one parent of all ranks, in their order, and in no children of its own."""
    ids = np.arange(len(np.atleast_1d(np.asarray(lengths))))
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    parent = Parent(0, size, (Child(0, size, ids),), NARROW)
    return Plan(size, size, ids, sizes, (parent,))
