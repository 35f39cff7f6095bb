"""The `parallel.repacking` node: how a planner decides, see `planner.py`."""

from dataclasses import dataclass

from configs.values import at_least, one_of

BASELINES, FITS = ("homogeneous", "mixed"), ("time", "rows")


@dataclass(kw_only=True)
class RepackingConfig:
    """How samples are spread over ranks where `parallel.sequence.max_parent` is set."""

    enabled: bool = True
    """Repack the sparse layers of parents that span nodes; false: every sample keeps one group in all
    layers, which is Ulysses over as many ranks as it needs."""
    parent_solver: bool = True
    """Choose which samples share a parent; false: the baseline's groups."""
    several_widths: bool = True
    """The parent solver may also make parents of several widths."""
    baseline: str = "homogeneous"
    """Groups to begin with. homogeneous: all as wide as the step's longest sample needs; mixed: of
    several widths."""
    fit: str = "time"
    """How homogeneous groups are filled. time: by predicted time; rows: best fit by rows."""
    rows_per_rank: int = 16384
    """A homogeneous group is so wide that the longest sample has at most so many rows on a rank."""
    max_rows: int | None = None
    """Rows that a rank may hold; a micro-batch that cannot be planned so is an error, and
    trainer.dry_run plans the memory for so many; null: no limit."""
    max_child: int | None = None
    """The widest child; null: a node."""
    min_child: int = 1
    """The narrowest child."""
    inside_nodes: bool = False
    """Repack parents that lie inside one node, too."""
    calibration: str | None = None
    """What layers and links take: a file of benchmarks.repacking.calibrate, or h200 or cpu, which come
    with the package; null: by device."""
    search_parents: int = 32
    """The parent solver ends after solving so many parents, and all ranks come to the same plan."""
    search_seconds: float | None = None
    """The parent solver ends by the clock instead; not for training, where every rank plans."""

    def __post_init__(self) -> None:
        one_of("parallel.repacking.baseline", self.baseline, BASELINES)
        one_of("parallel.repacking.fit", self.fit, FITS)
        for name in ("rows_per_rank", "min_child"):
            at_least(f"parallel.repacking.{name}", getattr(self, name), 1)
        at_least("parallel.repacking.search_parents", self.search_parents, 0)
        if self.max_rows is not None:
            at_least("parallel.repacking.max_rows", self.max_rows, 1)
        if self.max_child is not None:
            at_least("parallel.repacking.max_child", self.max_child, self.min_child)
        if self.search_seconds is not None:
            at_least("parallel.repacking.search_seconds", self.search_seconds, 0)
