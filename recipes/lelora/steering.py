"""Between optimizer steps: what was the last decision worth, and what trains from now on.

    M matrices, F features

    after every step      path credit, if that is the credit
    at a decision         measure the period on the meta samples
                          go back, if it was twice in a row for the worse
                          learn from it, decide again, switch, and write a line about it

Rank 0 decides and hands decision and state to all; what each rank made of it is compared.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives.host import all_gather, broadcast
from models.lelora.features import Faring, features, static_features
from models.lelora.inject import Target
from models.lelora.policy import load_policy, save_policy
from models.lelora.windows import STARTS
from recipes.abilities import Training
from recipes.lelora import kept
from recipes.lelora.brain import Brain, Decision
from recipes.lelora.candidates import Lessons, paused, try_each
from recipes.lelora.config import LeloraConfig
from recipes.lelora.credit import Measured, Measures, Parameters
from recipes.lelora.journal import Journal
from recipes.lelora.path_credit import PathCredit
from recipes.lelora.population import Course, School, teach
from recipes.lelora.ranks import num_ranks, this_rank
from recipes.lelora.shards import Snapshot, copy_all, local
from recipes.lelora.spectra import Spectra
from recipes.lelora.switching import Adapters


class LeloraSteering:
    """See `recipes.abilities.Steering`. `meter` None: decisions are not judged."""

    def __init__(
        self,
        config: LeloraConfig,
        training: Training,
        targets: Sequence[Target],
        meter: Measures | None,
        lessons: Lessons | None = None,
        school: School | None = None,
        spectra: Spectra | None = None,
    ) -> None:
        """`lessons` are what grpo tries its candidates on; `spectra` are found if they are not given."""
        self.config, self.training, self.lessons, self.school = config, training, lessons, school
        names = [target.name for target in targets]
        self.brain = Brain(config, [target.shape for target in targets], names, training.seed)
        self.adapters = Adapters(config, training, targets, self.brain, spectra)
        values = [atoms.values_K for atoms in self.adapters.atoms]
        self.static_MF = static_features(targets, values)
        self.parameters = Parameters(training.model, [target.adapter for target in targets])
        self.meter = meter
        self.path: PathCredit | None = None
        if meter is not None and config.credit == "path":
            self.path = PathCredit(training.optimizer, self.parameters, training.max_norm)
        M = len(targets)
        self.credit_M, self.gradient_M = torch.zeros(M).double(), torch.zeros(M).double()
        self.last_step, self.bad = 0, 0
        self.loss, self.first_loss, self.drop = 0.0, 0.0, 0.0
        self._start()
        self.pending = (
            torch.zeros_like(self._features(0)),
            torch.zeros(M, 4).long(),
            torch.zeros(M),
        )
        self.has_pending = False
        self.journal = Journal(training.run_dir, names)

    def _start(self) -> None:
        """The first setting, the same on every rank."""
        seen = broadcast(self._features(0))
        self.course = self._learn_from_others(seen)
        first = self.brain.first
        if self.config.method == "lelora":
            first = broadcast(self.brain.begin(seen))
        self.adapters.apply(first, self.brain.budget)
        self.begin = self._parameters()
        self.good, self.good_setting = Snapshot(self.training.model, self.training.optimizer), first
        if self.path is not None:
            self.path.begin()

    def _learn_from_others(self, seen: Tensor) -> Course | None:
        """From a population, unless an earlier start of this run has."""
        config, training = self.config, self.training
        file = training.run_dir / "policy.safetensors"
        if self.school is None or not config.population:
            return None
        if broadcast(file.is_file()):
            load_policy(file, self.brain.learner.policy)
            return None
        course = teach(
            self.brain, self.adapters.targets, self.adapters.directions(), self.school, seen,
            runs=config.population, rounds=config.population_rounds, steps=config.population_steps,
            lr=training.optimizer.param_groups[0]["lr"], max_norm=training.max_norm,
        )  # fmt: skip
        if this_rank() == 0:
            told = {"rounds": [vars(each) for each in course.rounds], "runs": config.population,
                    "contest": vars(course.contest)}  # fmt: skip
            save_policy(file, self.brain.learner.policy, told)
        return course

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.named.items()}

    def words(self) -> str:
        """What trains, for the console."""
        spectra, setting = self.adapters.spectra, self.adapters.setting
        text = (
            f"{len(setting.widths)} matrices, {self.brain.cost(setting):,} parameters of adapters"
        )
        if self.course is not None:
            text += f"; {self.course.words()}"
        took = f"decomposed in {spectra.seconds:.1f} s" if spectra.seconds else "decomposed before"
        return f"{text}; {took} ({spectra.file.name})"

    def after_step(self, step: int, norm: Tensor) -> None:
        """See `recipes.abilities.Steering`."""
        if self.path is not None:
            self.path.after_step(norm)
        if self.decides(step):
            self._decide(step)
        elif step == self._cut_step():
            done = self.adapters.apply(
                self.brain.cut(self.adapters.setting, self._budget(step)), 2**62
            )
            self._end_decision(step, {"cut": True, **done})

    def decides(self, step: int) -> bool:
        """Whether a period ends here: until `until`, and once more to judge the last decision."""
        config = self.config
        if config.method not in ("lelora", "random") or step < config.first:
            return False
        last = config.until * self.training.steps
        return (step - config.first) % config.period == 0 and step <= last + config.period

    def _cut_step(self) -> int:
        """The step after which the budget is smaller; -1: none."""
        config = self.config
        return math.ceil(config.prune_at * self.training.steps) if config.prune_to < 1 else -1

    def _budget(self, step: int) -> int:
        fallen = 0 <= self._cut_step() <= step
        return int(self.brain.budget * self.config.prune_to) if fallen else self.brain.budget

    def _share(self, step: int) -> float:
        """Of the time in which there are decisions."""
        return step / max(self.config.until * self.training.steps, 1)

    def _decide(self, step: int) -> None:
        row: dict[str, object] = {}
        went_back = False
        if self.meter is not None:
            measured = self._measure(self.meter)
            reward = self._reward()
            row |= {"loss": measured.after, "reward": reward, "reliability": measured.reliability,
                    "credit_gap": measured.gap, "credit": measured.credit_M.tolist()}  # fmt: skip
            went_back = self._go_back_if_worse(measured, reward)
            row |= self._learn(measured, reward, step)
        over = self._share(step) > 1
        self.has_pending = False
        if not over and not went_back:
            decision, more = self._next(step)
            done = self.adapters.apply(decision.setting, self._budget(step))
            held = int(decision.actions_M4[:, 0].sum())
            row |= {"held": held, "log_prob": decision.log_prob_M.tolist(), **more, **done}
        self._end_decision(step, {"went_back": went_back, **row})

    def _end_decision(self, step: int, row: Mapping[str, object]) -> None:
        """A period begins; every rank is where rank 0 is; a line about it."""
        copy_all([local(before) for before in self.begin.values()], self.parameters.values())
        if self.path is not None:
            self.path.begin()
        self._compare(step)
        self.last_step = step
        now = self.adapters.setting
        self.journal.write(
            {"step": step, "widths": now.widths, "starts": now.starts, "scales": now.scales,
             "cost": self.brain.cost(now), "budget": self._budget(step), **row}
        )  # fmt: skip

    def _measure(self, meter: Measures) -> Measured:
        measured = meter.measure(self.begin)
        if self.path is not None:
            measured = self.path.instead_of(measured)
        self.first_loss = self.first_loss or measured.before
        self.credit_M, self.gradient_M = measured.credit_M, measured.gradient_M
        self.loss = measured.after
        drop = (measured.before - measured.after) / (abs(measured.before) + 1e-8)
        self.drop = drop if math.isfinite(drop) else -1.0
        return measured

    def _reward(self) -> float:
        """The share of the meta loss that the period took away, less what it cost."""
        config, adapters = self.config, self.adapters
        used = self.brain.cost(adapters.setting) / max(self.brain.budget, 1)
        changed = float(adapters.moved_M.mean())
        return self.drop - config.cost_weight * used - config.switch_weight * changed

    def _go_back_if_worse(self, measured: Measured, reward: float) -> bool:
        """After two bad periods, or one beyond repair: adapters as they were before them."""
        worse = measured.after - measured.before > self.config.rollback * abs(measured.before)
        broken = not math.isfinite(measured.after) or not math.isfinite(reward)
        broken = broken or measured.after > 2 * max(self.first_loss, 1e-8)
        self.bad = self.bad + 1 if worse else 0
        if not broken and self.bad < 2:
            if not worse:
                self.good.take()
                self.good_setting = self.adapters.setting
            return False
        self.good.give_back()
        self.adapters.go_on(self.good_setting)
        self.bad, self.has_pending = 0, False
        return True

    def _learn(self, measured: Measured, reward: float, step: int) -> dict[str, object]:
        """On rank 0, from the decision before this period; then all ranks know what it knows."""
        config = self.config
        if config.method != "lelora" or not self.has_pending or not config.policy.train:
            return {}
        if measured.reliability < config.min_reliability and config.credit_weight > 0:
            return {"learnt": False, "why": "the two halves of the credit do not agree"}
        seen, actions, logs = self.pending
        decision = Decision(actions, logs, self.adapters.setting)
        return self._taught(seen, [decision], [reward], step)

    def _taught(
        self, seen: Tensor, decisions: Sequence[Decision], rewards: Sequence[float], step: int
    ) -> dict[str, object]:
        learnt = None
        if this_rank() == 0:
            learnt = self.brain.learn(seen, decisions, rewards, self.credit_M, self._share(step))
        self._share_brain()
        return {"learnt": True, **(vars(learnt) if learnt is not None else {})}

    def _features(self, step: int) -> Tensor:
        adapters, training = self.adapters, self.training
        now = adapters.setting
        places = [STARTS[start] if start >= 0 else 0.0 for start in now.starts]
        sizes = [float(shape.outputs + shape.inputs) for shape in self.brain.shapes]
        faring = Faring(
            drift_M=adapters.drift(),
            gradient_M=self.gradient_M,
            credit_M=self.credit_M / torch.tensor(sizes, dtype=torch.float64),
            age_M=adapters.ages_M,
            width_M=torch.tensor(now.widths) / max(self.config.widths),
            scale_M=torch.tensor(now.scales),
            start_M=torch.tensor(places),
            moved_M=adapters.moved_M,
            progress=step / training.steps,
            loss=self.loss / self.first_loss if self.first_loss else 1.0,
            drop=self.drop,
            budget_left=1 - self.brain.cost(now) / max(self._budget(step), 1),
            rate=training.rate(max(step, 1)),
        )
        return features(self.static_MF, faring)

    def _next(self, step: int) -> tuple[Decision, dict[str, object]]:
        """Rank 0's decision, on every rank, and more to write about it."""
        config, budget = self.config, self._budget(step)
        seen = broadcast(self._features(step))
        policy, learns = config.policy, config.method == "lelora" and config.policy.train
        number = policy.candidates if policy.algo == "grpo" and learns else 1
        made: list[Decision] = []
        if this_rank() == 0:
            made = [self.brain.decide(seen, self.adapters.setting, budget) for _ in range(number)]
        made = broadcast(made)
        self._share_brain()
        if number == 1:
            self.pending = (seen, made[0].actions_M4, made[0].log_prob_M)
            self.has_pending = True
            return made[0], {}
        assert self.meter is not None
        assert self.lessons is not None
        with paused(self.path):
            rewards = try_each(
                made, self.adapters, self.training, self.lessons, self.meter, step * policy.horizon,
                policy.horizon, budget,
            )  # fmt: skip
        more = self._taught(seen, made, rewards, step)
        best = max(range(number), key=lambda n: (rewards[n], -n))
        return made[best], {"candidates": rewards, **more}

    def _share_brain(self) -> None:
        if num_ranks() > 1:
            self.brain.load(broadcast(self.brain.state()))

    def _compare(self, step: int) -> None:
        """Raise `RuntimeError` if some rank's adapters or policy are not those of rank 0."""
        setting = [x for row in self.adapters.setting.tensor().tolist() for x in row]
        policy = sum(
            float(p.detach().double().sum()) for p in self.brain.learner.policy.parameters()
        )
        every = all_gather([*setting, float(self.adapters.fingerprint()), policy])
        other = [rank for rank, found in enumerate(every) if found != every[0]]
        if other:
            raise RuntimeError(f"after step {step}, rank {other[0]} has other adapters than rank 0")

    def state(self) -> dict[str, Tensor]:
        """See `recipes.abilities.Steering`."""
        return kept.state_of(self)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See `recipes.abilities.Steering`."""
        kept.load(self, state)
