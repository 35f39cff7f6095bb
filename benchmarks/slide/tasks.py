"""The recipe's tasks that a study trains, by the names of its models."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.slide.plan import Learning, Plan, Reinforcement, Teaching
from models.slide.ids import make_ids
from recipes.slide.data import Data
from recipes.slide.gr_train import GrTrainConfig, GrTrainTask
from recipes.slide.list_distill import ListDistillConfig, ListDistillTask
from recipes.slide.list_rl import ListRlConfig, ListRlTask

IN_MEMORY = "in memory"
"""Where a task's folders are."""


@dataclass(frozen=True)
class Tasks:
    """Of one set and one plan."""

    data: Data
    plan: Plan

    def of(self, name: str) -> GrTrainTask:
        """The task that trains a model of this name."""
        how, _, codes = name.rpartition("_")
        return dict(self.teachers()).get(name) or self.student(codes, how)

    def teachers(self) -> Iterator[tuple[str, GrTrainTask]]:
        """All that the plan names, and those of the folds."""
        plan = self.plan
        wanted = {name: (*how, 0, 0) for name, how in plan.teachers.items()}
        for fold in range(plan.folds):
            wanted[f"fold{fold}"] = (*plan.teachers["h"], plan.folds, fold)
        for name, (size, codes, _, folds, fold) in wanted.items():
            beams = max(10, min(20, plan.beams))
            yield name, self.teacher(size, codes, beams, plan.teaching, folds, fold)

    def teacher(
        self, size: str, codes: str, beams: int, teaching: Teaching, folds: int = 0, fold: int = 0
    ) -> GrTrainTask:
        """One that predicts the next item."""
        task = GrTrainTask(
            task=GrTrainConfig(sids=IN_MEMORY, beams=beams, folds=folds, fold=fold),
            model=replace(self.plan.model(size, codes, 0, teaching.dropout), tied=teaching.tied),
            data=self.data.config,
            seed=0,
        )
        task.data = _of_items(self.data) if codes == "items" else self.data
        return task

    def student(self, codes: str, how: str, learning: Learning | None = None) -> ListDistillTask:
        """One that writes lists; `how` is what its name says before the kind of codes."""
        plan, learning = self.plan, learning or self.plan.learning
        task = ListDistillTask(
            task=ListDistillConfig(
                sids=IN_MEMORY, lists=IN_MEMORY, source="real" if how == "direct" else "lists",
                order="random" if how == "shuffled" else "score",
                weights="log" if how == "log" else "uniform",
            ),
            model=plan.model("s", codes, plan.length, learning.dropout),
            data=self.data.config,
            seed=0,
        )  # fmt: skip
        task.data = self.data
        return task

    def reinforced(self, way: Reinforcement) -> ListRlTask:
        """What makes a student with heads better."""
        task = ListRlTask(
            task=ListRlConfig(
                sids=IN_MEMORY, lists=IN_MEMORY, teacher=IN_MEMORY, credit=way.credit,
                ndcg=way.ndcg, overlap=way.overlap, graded=way.graded,
            ),
            model=self.plan.model("s", "heads", self.plan.length, 0.0),
            data=self.data.config,
            seed=0,
        )  # fmt: skip
        task.data = self.data
        return task


def _of_items(data: Data) -> Data:
    """The same with IDs of one code, the item's number."""
    other = copy(data)
    numbers_I1 = np.arange(data.sequences.num_items, dtype=np.int64)[:, None]
    other.ids = make_ids(numbers_I1, [len(numbers_I1)])
    return other
