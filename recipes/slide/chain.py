"""Task `slide`: all stages, one after the other, each given what those before it have left.

sid_build --- gr_train --- beam_export --- list_distill [--- list_rl] --- list_eval

With folds, `gr_train` is followed by a teacher without each of them, and those make the lists; students
begin with the weights of the one that is trained on all users, and are compared with it. With an
ensemble it is followed by teachers with other seeds, and all of them make the lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from configs.values import at_least
from models.slide.config import SlideConfig
from recipes.slide.config import SequencesConfig
from recipes.slide.gr_train import check_folds
from recipes.work import Stage

STAGES = ("sid_build", "gr_train", "beam_export", "list_distill", "list_rl", "list_eval")


@dataclass(kw_only=True)
class SlideTaskConfig:
    """The `task` node."""

    name: str = "slide"
    stages: dict[str, Any] = field(default_factory=dict)
    """For each stage, what is different from the chain's own nodes and the stage's defaults: `task`,
    `model`, `trainer`, `optim` ... as they would be given to it alone."""
    rl: bool = False
    """Also `list_rl`, which goes on from the student; `list_eval` knows its model as `improved`."""
    folds: int = 0
    """Cross-fit: each user's lists are from a teacher that is trained without that user's fold, of so
    many; 0: from the one that is trained on all."""
    ensemble: int = 1
    """So many teachers, with seeds one after the other: lists are of their mean log-probability;
    `list_eval` knows them all as `ensemble`."""
    until: str = STAGES[-1]
    """The last stage to run."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.stages) - set(STAGES))
        if unknown or self.until not in STAGES:
            key = f"task.stages.{unknown[0]}" if unknown else f"task.until={self.until}"
            raise ValueError(f"{key}: the stages are {', '.join(STAGES)}")
        check_folds(self.folds)
        at_least("task.ensemble", self.ensemble, 1)
        if self.folds and self.ensemble > 1:
            raise ValueError(
                f"task.folds={self.folds} and task.ensemble={self.ensemble}: set task.folds=0, or "
                "task.ensemble=1"
            )


class SlideTask:
    """See `recipes.work.Chain`."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": SlideTaskConfig,
        "model": SlideConfig,
        "data": SequencesConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(self, *, task: SlideTaskConfig, model: Any, data: Any, seed: int) -> None:
        del model, data
        self.config, self.seed = task, seed

    def stages(self, folder: Path) -> Sequence[Stage]:
        """The stages, with the folders that each reads."""
        sids, lists = str(folder / "sid_build"), str(folder / "beam_export")
        teacher = str(folder / "gr_train" / "exported")
        parts = [f"gr_train_fold{fold}" for fold in range(self.config.folds)]
        more = [f"gr_train_seed{number}" for number in range(1, self.config.ensemble)]
        others = [str(folder / part / "exported") for part in (*parts, *more)]
        teachers = others if parts else [teacher, *others]
        student = str(folder / "list_distill" / "exported")
        given: dict[str, dict[str, Any]] = {
            "sid_build": {},
            "gr_train": {"sids": sids},
            "beam_export": {"sids": sids, "teachers": teachers},
            "list_distill": {"sids": sids, "lists": lists, "teacher": teacher},
            "list_rl": {"sids": sids, "lists": lists, "teacher": student},
            "list_eval": {"models": {"teacher": teacher, "student": student}},
        }
        if self.config.rl:
            improved = str(folder / "list_rl" / "exported")
            given["list_eval"]["models"]["improved"] = improved
        if more:
            given["list_eval"]["models"]["ensemble"] = teachers
        found = []
        for name in STAGES[: STAGES.index(self.config.until) + 1]:
            if name == "list_rl" and not self.config.rl:
                continue
            own = self.config.stages.get(name) or {}
            task = {"name": name, **given[name], **(own.get("task") or {})}
            found.append(Stage(name, {**own, "task": task}))
            for fold, part in enumerate(parts if name == "gr_train" else ()):
                of_fold = {**task, "folds": len(parts), "fold": fold}
                found.append(Stage(part, {**own, "task": of_fold}))
            for number, part in enumerate(more if name == "gr_train" else (), start=1):
                trainer = own.get("trainer") or {}
                seeded = {**trainer, "seed": trainer.get("seed", self.seed) + number}
                found.append(Stage(part, {**own, "trainer": seeded, "task": task}))
        return found
