"""The chain for one set and one seed, in memory: teachers, lists, students, and how they compare.

What is trained, searched, decoded and compared is the recipe's own code; only the loop is not, for
here many small models train at once (`benchmarks.slide.fleet`).
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.slide import columns
from benchmarks.slide.fleet import Evaluate, Member, Running, Schedule, Trained, train
from benchmarks.slide.judging import Judging
from benchmarks.slide.plan import Learning, Plan, Reinforcement, Teaching
from benchmarks.slide.tasks import IN_MEMORY, Tasks
from models.slide.folder import Exported
from models.slide.graphs import recorded
from models.slide.history import NOTHING
from recipes.slide.beam_export import BeamExportConfig, Search
from recipes.slide.data import Data
from recipes.slide.gr_train import GrTrainTask
from recipes.slide.shards import Rows
from recipes.slide.teachers import Teachers

AGREEMENT = 4096
"""Histories for which lists are compared with the teachers'."""


@dataclass
class Study:
    """One set, one seed."""

    data: Data
    plan: Plan
    seed: int
    device: torch.device
    graphs: bool
    dtype: torch.dtype = torch.bfloat16
    """What models compute in; their weights are kept in fp32."""
    say: Callable[[str], None] = print
    trainings: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.data, self.plan)
        self.judging = Judging(self.data, self.plan, self.device, self.say)

    def run(self, done: Collection[str] = ()) -> Iterator[str]:
        """The stages in order, but for those done; what is found so far is whole after each."""
        for stage in (self.teachers, self.searches, self.lists, self.students, self.decoding,
                      self.reinforcement):  # fmt: skip
            if stage.__name__ in done:
                continue
            began = time.monotonic()
            stage()
            self.seconds[stage.__name__] = time.monotonic() - began
            self.say(f"{stage.__name__}: {self.seconds[stage.__name__]:.1f} s")
            yield stage.__name__

    def add(self, name: str, task: GrTrainTask, trained: Trained) -> None:
        """A model that others learn from, and that is compared."""
        self.trained[name] = trained
        folds = {key: getattr(task.config, key, 0) for key in ("folds", "fold")}
        self.judging.models[name] = [Exported(trained.model, task.data.ids, [], folds, name)]

    def member(self, name: str, task: GrTrainTask, teaching: Teaching, seed: int) -> Member:
        """A teacher of the fleet."""
        found, lengths = columns.of_windows(task, self.device)
        return Member(
            name, task, teaching.optim, seed, found, lengths, columns.batches_of(task, self.device),
            by_target=teaching.by_target,
        )  # fmt: skip

    def teachers(self) -> None:
        """All of them at once."""
        plan = self.plan
        members = [
            self.member(name, task, plan.teaching, self.seed + _shift(plan, name))
            for name, task in self.tasks.teachers()
        ]
        self._train(members, plan.teacher_epochs, plan.teacher_batch)

    def trials(self, teachings: Mapping[str, Teaching]) -> dict[str, float]:
        """Teachers by heads, one for each way to train them: the best NDCG@10 on validation."""
        plan = self.plan
        members = [
            self.member(name, self.tasks.teacher("s", "heads", 10, teaching), teaching, self.seed)
            for name, teaching in teachings.items()
        ]
        self._train(members, plan.teacher_epochs, plan.teacher_batch)
        return {name: float(self.trained[name].best["ndcg@10"]) for name in teachings}

    def searches(self) -> None:
        """Beam search of each teacher and of all, with counts, whose weight validation chooses."""
        for text in ("s:beam10", "s:beam20", "s:beam50", "h:beam50", "m:beam50", "s:repeat",
                     "h:repeat", "sasrec:beam10"):  # fmt: skip
            if text.partition(":")[0] in self.judging.models:
                self.judging.judge(text)
        self.judging.ensemble()
        for name in ("s", "e"):
            self.judging.counted(name)

    def lists(self) -> None:
        """The lists that students learn from."""
        alpha = self.judging.about["counts of e"]["chosen"]
        both = self._export(self.judging.models["e"], alpha, ends=True)
        known = both.targets_R != NOTHING
        others = ~np.isin(both.users_R, self.judging.some_users()) & (both.copies_R == 0)
        self.exported: dict[str, Rows] = {
            "strong": columns.of_rows(both, known), "ends": columns.of_rows(both, ~known & others),
        }  # fmt: skip
        folds = [f"fold{fold}" for fold in range(self.plan.folds)]
        for name, teachers in (
            ("weak_heads", ["h"]),
            ("weak_steps", ["s"]),
            ("cross_heads", folds),
        ):
            if name in self.plan.students:
                asked = [self.judging.models[teacher][0] for teacher in teachers]
                self.exported[name] = self._export(asked, 0.0)

    def _export(self, asked: Sequence[Exported], counts: float, ends: bool = False) -> Rows:
        plan = self.plan
        config = BeamExportConfig(
            sids=IN_MEMORY, teachers=[IN_MEMORY], beams=plan.beams, counts=counts,
            copies=plan.learning.copies, shards=1, batch_size=plan.batch, newest=plan.newest,
            ends=ends,
        )  # fmt: skip
        folds = int(asked[0].about.get("folds", 0))
        search = Search(config, self.data, Teachers(asked, folds), self.device)
        rows = search.rows(np.arange(len(search.prefixes.rows[0])), lambda: False)
        assert rows is not None
        own = rows.target_ranks[(rows.copies_R == 0) & (rows.targets_R != NOTHING)]
        name = "+".join(exported.fingerprint for exported in asked)
        self.judging.about[f"targets in the lists of {name}"] = {
            str(top): float(((own >= 0) & (own < top)).mean()) for top in (1, 10, 50)
        }
        return rows

    def students(self) -> None:
        """All of them at once."""
        plan = self.plan
        members = [self.student(name, name, plan.learning) for name in self.taught()]
        epochs = plan.learning.epochs * plan.shorter
        self._train(members, epochs, plan.student_batch, self._prefixes())

    def taught(self) -> list[str]:
        """The students of the plan, but for those without copies where there are none anyway."""
        copies = self.plan.learning.copies
        return [name for name in self.plan.students if copies or not name.startswith("plain")]

    def student(self, name: str, kind: str, learning: Learning) -> Member:
        """A student of the fleet; `kind` is one of `Plan.students`."""
        how, _, codes = kind.rpartition("_")
        task = self.tasks.student(codes, how, learning)
        if how == "direct":
            found, lengths = columns.of_followed(task, self.device)
        else:
            rows = self.exported.get(kind, self.exported["strong"])
            if not learning.copies or how == "plain":
                rows = columns.of_rows(rows, rows.copies_R == 0)
            if how == "ends":
                rows = columns.joined(rows, self.exported["ends"])
            found, lengths = columns.of_lists(task, rows, self.device)
        teacher = self.trained["h" if codes == "heads" else "s"].model
        start = dict(teacher.state_dict())  # as it computes: a study that goes on has no others
        batches = columns.batches_of(task, self.device)
        return Member(name, task, learning.optim, self.seed, found, lengths, batches, start)

    def learnings(self, ways: Mapping[str, Learning]) -> dict[str, float]:
        """Students by heads of the ensemble, one for each way: the best NDCG@10 on validation."""
        self.teachers()
        self.judging.ensemble()
        self.judging.counted("e")
        self.lists()
        for epochs in sorted({way.epochs for way in ways.values()}):
            members = [
                self.student(name, "heads", way)
                for name, way in ways.items()
                if way.epochs == epochs
            ]
            epochs *= self.plan.shorter
            self._train(members, epochs, self.plan.student_batch, self._prefixes())
        return {name: float(self.trained[name].best["ndcg@10"]) for name in ways}

    def _prefixes(self) -> int:
        users_R, targets_R = self.data.split.prefixes()
        if self.plan.newest is None:
            return len(users_R)
        return int((self.data.split.train_ends[users_R] - targets_R <= self.plan.newest).sum())

    def decoding(self) -> None:
        """The students' lists, and their beam search."""
        for name in self.taught():
            self.judging.judge(f"{name}:greedy")
        for name in ("heads", "steps"):
            if name in self.judging.models:
                self.judging.judge(f"{name}:beam50")
        self._agree(self.taught())

    def reinforcement(self) -> None:
        """List-level reinforcement learning of the student `heads`: of all ways, validation chooses."""
        ways = self.plan.reinforcements
        if "heads" not in self.judging.models or not ways:
            return
        for steps, batch in sorted({(way.steps, way.batch) for way in ways.values()}):
            members = [
                self.reinforced(f"rl: {name}", way)
                for name, way in ways.items()
                if (way.steps, way.batch) == (steps, batch)
            ]
            rows = max(len(member.lengths_R) for member in members)
            self._train(members, steps * batch / rows, batch, rows, reinforced=True)
        figures = {name: float(self.trained[f"rl: {name}"].best["ndcg@10"]) for name in ways}
        best = max(figures, key=lambda name: figures[name])
        self.judging.about["reinforcements"] = {"chosen": best, "validation ndcg@10": figures}
        chosen = "rl_heads" if best == "first" else "reinforced_heads"
        self.judging.models[chosen] = self.judging.models[f"rl: {best}"]
        self.judging.judge(f"{chosen}:greedy")
        self._agree([chosen])

    def reinforced(self, name: str, way: Reinforcement) -> Member:
        """The student `heads` again, to go on in this way."""
        task = self.tasks.reinforced(way)
        task.begun[self.device] = self.judging.models["heads"][0]
        rows = self.exported["ends" if way.ends else "strong"]
        found, lengths = columns.of_groups(task, rows, self.device)
        batches = columns.groups_of(task, self.device)
        start = self.trained["heads"].weights
        return Member(name, task, way.optim, self.seed, found, lengths, batches, start)

    def _agree(self, names: Sequence[str]) -> None:
        """What students' lists share with the ensemble's, of histories learnt from and of others."""
        found = self.judging.about.setdefault("agreement", {})
        parts = {part: self.exported[part] for part in ("strong", "ends")}
        for name in names:
            found[name] = {
                part: self.judging.shared(name, rows, AGREEMENT)
                for part, rows in parts.items()
                if len(rows.users_R)
            }

    def _train(
        self, members: Sequence[Member], epochs: float, batch: int, rows: int | None = None,
        reinforced: bool = False,
    ) -> None:  # fmt: skip
        plan = self.plan
        longest = max(int(member.lengths_R.max()) for member in members)
        added = plan.length if members[0].task.model_config.list_length else 1
        limits = sorted({n + added for n in (4, 8, 12) if n + added < longest} | {longest})
        steps = max(plan.evaluations, round(epochs * (rows or len(members[0].lengths_R)) / batch))
        patience = 0.0 if reinforced else plan.patience
        schedule = Schedule(limits, batch, steps, plan.evaluations, patience, reinforced)
        began = time.monotonic()
        done = train(
            members, schedule, self._evaluate(members), self.device, self.dtype, self.graphs
        )
        seconds = time.monotonic() - began
        tasks = {member.name: member.task for member in members}
        for name, trained in done.items():
            self.add(name, tasks[name], trained)
            parameters = sum(p.numel() for p in trained.model.parameters())
            self.trainings[name] = {
                "steps": steps, "batch": batch, "parameters": parameters, "best": trained.best,
                "log": trained.log, "seconds": seconds, "together": len(members),
            }  # fmt: skip
            self.say(f"  {name}: {trained.best}")

    def _evaluate(self, members: Sequence[Member]) -> Evaluate:
        """Recall and NDCG on some users of validation, as the tasks have it."""
        plan = self.plan
        kept: dict[str, Callable[[], torch.Tensor]] = {}
        users, chosen = members[0].task.evaluated, self.judging.some_users()
        parts = [chosen[n : n + plan.batch] for n in range(0, len(chosen), plan.batch)]
        batches = []
        for part in parts:
            batch = members[0].task.collate([users[n] for n in part])
            batches.append({
                k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()
            })  # fmt: skip

        def evaluate(running: Running) -> Mapping[str, float]:
            member = running.member

            def summed() -> torch.Tensor:
                found = [member.task.evaluate(running.model, batch)["places"] for batch in batches]
                return torch.stack([torch.as_tensor(x) for x in found]).sum(0)

            if member.name not in kept:
                kept[member.name] = recorded(summed) if self._captures else summed
            found = member.task.summarize({"places": kept[member.name]().cpu().numpy()})
            return {k: v for k, v in found.items() if k.startswith(("recall", "ndcg"))}

        return evaluate

    @property
    def _captures(self) -> bool:
        return self.graphs and self.device.type == "cuda"


def _shift(plan: Plan, name: str) -> int:
    return plan.teachers[name][2] if name in plan.teachers else 0
