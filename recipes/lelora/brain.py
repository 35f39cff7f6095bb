"""Policy and learner: rank 0 thinks, and every rank holds the same state afterwards.

    M matrices, F features, W widths

What is decided is a `Setting` of each matrix. The policy samples actions; a decision that would change
too many rows at once, or cost too much, is cut down the same way every time. What the policy learns from
is what it sampled: cutting down is the world's doing, and has no part in the log-probability.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.lelora.actions import (
    HOLD,
    SCALE,
    START,
    WIDTH,
    Logits,
    Space,
    allowed_widths,
    log_prob,
    masked,
    most_likely,
    sample,
    warm_logits,
)
from models.lelora.budget import Shape, cost, fill, project, scaled, total_cost
from models.lelora.learner import Experience, Learner, Learnt, entropy_weight, group_advantages
from models.lelora.policy import build_policy, load_policy
from models.lelora.windows import order, window
from recipes.lelora.config import LeloraConfig
from recipes.lelora.exploration import tilted

SMOOTH = 0.8
"""How much of the mean reward, and of its variance, is kept from period to period."""


@dataclass(frozen=True)
class Setting:
    """What trains: the width of each matrix, the place of its window (-1: none), and its scale."""

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    scales: tuple[float, ...]

    def of_matrix(self, matrix: int) -> tuple[int, int, float]:
        """Its width, start and scale."""
        return self.widths[matrix], self.starts[matrix], self.scales[matrix]

    def tensor(self) -> Tensor:
        """(3, M) in fp64."""
        return torch.tensor([self.widths, self.starts, self.scales], dtype=torch.float64)

    @staticmethod
    def of(tensor: Tensor) -> "Setting":
        """The way back."""
        widths, starts, scales = tensor.tolist()
        return Setting(tuple(map(int, widths)), tuple(map(int, starts)), tuple(scales))


@dataclass(frozen=True)
class Decision:
    """What the policy sampled, and what became of it."""

    actions_M4: Tensor
    log_prob_M: Tensor
    setting: Setting


class Brain:
    """All that decides, for matrices of these shapes and names."""

    def __init__(
        self, config: LeloraConfig, shapes: Sequence[Shape], names: Sequence[str], seed: int
    ) -> None:
        self.config, self.shapes, self.seed = config, list(shapes), seed
        self.names = list(names)
        ranked, scaled = "rank" in config.actions, "scale" in config.actions
        self.allowed = sorted({0, *config.widths})
        self.space = Space(
            tuple(self.allowed) if ranked else (config.rank,),
            tuple(sorted(config.scales)) if scaled else (1.0,),
            "window" in config.actions,
        )
        components = [shape.components for shape in self.shapes]
        self.fitting = [max(w for w in self.allowed if w <= k) for k in components]
        allowed_MW = allowed_widths(self.space, components)
        allowed_MW[~allowed_MW.any(1)] = True  # one width that some matrix is too small for
        start = 0 if config.window == "principal" else None
        warm = warm_logits(self.space, config.rank, config.policy.hold, start)
        policy = config.policy
        net = build_policy(self.space, warm, policy.net, policy.dim, policy.layers, seed)
        told = {} if policy.path is None else load_policy(Path(policy.path), net)
        self.spends = config.population > 0 or "runs" in told
        """The policy has learnt from populations, whose runs spend the whole budget."""
        self.learner = Learner(net, allowed_MW, policy.algo, policy.lr, policy.periods)
        self.generator = torch.Generator().manual_seed(seed)
        self.reward = torch.zeros(3, dtype=torch.float64)
        """Mean, variance, and how many there were."""
        full = [cost(config.param, s, min(config.rank, s.components)) for s in self.shapes]
        self.budget = sum(full) if config.budget is None else config.budget
        self.first = self._first()

    def _first(self) -> Setting:
        """`rank` everywhere at scale 1, as far as matrices and budget allow."""
        widths = [min(self.config.rank, fit) for fit in self.fitting]
        return Setting(
            tuple(self._afford(widths, self._warm_preferences(), self.budget)),
            (-1,) * len(widths),
            (1.0,) * len(widths),
        )

    def _warm_preferences(self) -> list[list[float]]:
        plain = Space(tuple(self.allowed), (1.0,), windows=False)
        logs = warm_logits(plain, self.config.rank, 0.5, None).width_MW.log_softmax(1)[0].tolist()
        return [logs] * len(self.shapes)

    def _afford(
        self, widths: Sequence[int], preferences: list[list[float]], budget: int
    ) -> list[int]:
        return project(self.config.param, self.shapes, widths, preferences, self.allowed, budget)

    def cost(self, setting: Setting) -> int:
        """Trainable parameters of its adapters."""
        return total_cost(self.config.param, self.shapes, setting.widths)

    def components(self, matrix: int, width: int, start: int) -> list[int]:
        """Which components of a matrix a width and a place train."""
        k = self.shapes[matrix].components
        if start >= 0:
            return window(start, width, k)
        key = f"{self.seed}/{self.names[matrix]}"
        return order(self.config.window, max(self.allowed), k, key)[:width]

    def _logits(self, features_MF: Tensor, generator: torch.Generator | None = None) -> Logits:
        """The policy's; with a generator: by chance."""
        if generator is None:
            with torch.no_grad():
                logits: Logits = self.learner.policy(features_MF, self.learner.allowed_MW).logits
            return logits
        M, W = len(self.shapes), len(self.space.widths)
        # all widths are as likely, but for so little that equals are not cut down in the model's order
        width_MW = 1e-3 * torch.rand(M, W, generator=generator)
        hold = torch.tensor(self.config.policy.hold).logit().expand(M)
        starts, scales = (
            torch.zeros(M, W, self.space.starts),
            torch.zeros(M, len(self.space.scales)),
        )
        return masked(Logits(hold, width_MW, starts, scales), self.learner.allowed_MW)

    def begin(self, features_MF: Tensor) -> Setting:
        """Where a run starts: what a policy that has learnt finds best, else `first`."""
        if self.config.policy.path is None and not self.config.population:
            return self.first
        logits = self._logits(features_MF)
        wanted = self._wanted(most_likely(logits), self.first)
        if len(self.space.widths) > 1:
            widths = scaled(
                self.config.param, self.shapes, wanted.widths, self.allowed, self.budget
            )
            wanted = Setting(tuple(widths), wanted.starts, wanted.scales)
        setting = self._affordable(wanted, logits, self.budget)
        return self._filled(setting, logits) if self.spends else setting

    def decide(
        self,
        features_MF: Tensor,
        now: Setting,
        budget: int,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Sample actions, and cut down what they would change and cost."""
        generator = generator or self.generator
        logits = self._logits(features_MF, generator if self.config.method == "random" else None)
        actions = sample(logits, generator)
        logs_M = log_prob(logits, self.space, actions)
        wanted = self._limited(self._wanted(actions, now), now, logits.hold_M)
        return Decision(actions, logs_M, self._affordable(wanted, logits, budget))

    def decide_afresh(
        self, features_MF: Tensor, generator: torch.Generator, spread: float = 0.0
    ) -> Decision:
        """Sample an action for every matrix, none held, for a run that has not begun.

        The whole budget is spent, so what one matrix gets another lacks. With `spread`, the policy's
        opinion is tilted: see `recipes.lelora.exploration`. The actions returned are what became of it.
        """
        logits = self._logits(features_MF, generator if self.config.method == "random" else None)
        tried = tilted(logits, self.space, features_MF, spread, generator) if spread else logits
        actions = sample(tried, generator)
        actions[:, HOLD] = 0
        wanted = self._wanted(actions, self.first)
        setting = self._filled(self._affordable(wanted, tried, self.budget), tried)
        if len(self.space.widths) > 1:
            actions[:, WIDTH] = torch.tensor([self.space.widths.index(w) for w in setting.widths])
        return Decision(actions, log_prob(logits, self.space, actions), setting)

    def _filled(self, setting: Setting, logits: Logits) -> Setting:
        """With what is left of the budget spent, if ranks are chosen."""
        if len(self.space.widths) == 1:
            return setting
        preferences = logits.width_MW.double().log_softmax(1).tolist()
        widths = fill(
            self.config.param, self.shapes, setting.widths, preferences, self.allowed, self.budget
        )
        return Setting(tuple(widths), setting.starts, setting.scales)

    def imitate(
        self, features_MF: Tensor, decisions: Sequence[Decision], rewards: Sequence[float],
        progress: float,
    ) -> Learnt:  # fmt: skip
        """Learn from a whole round: make likelier what was better than the round's mean."""
        told = [max(a, 0.0) for a in group_advantages(rewards)]
        group = [
            Experience(
                features_MF, d.actions_M4, d.log_prob_M, torch.full((len(features_MF),), a), r
            )
            for d, a, r in zip(decisions, told, rewards, strict=True)
            if a > 0
        ]
        weight = entropy_weight(self.config.policy.entropy, min(progress, 1.0))
        return self.learner.imitate(group, weight)

    def cut(self, now: Setting, budget: int) -> Setting:
        """As it is, within a smaller budget, all matrices alike."""
        widths = self._afford(now.widths, self._warm_preferences(), budget)
        return Setting(tuple(widths), now.starts, now.scales)

    def _wanted(self, actions_M4: Tensor, now: Setting) -> Setting:
        """What the actions ask for."""
        widths, starts, scales = list(now.widths), list(now.starts), list(now.scales)
        for matrix, action in enumerate(actions_M4.tolist()):
            if action[HOLD]:
                continue
            widths[matrix] = min(self.space.widths[action[WIDTH]], self.fitting[matrix])
            scales[matrix] = self.space.scales[action[SCALE]]
            if self.space.windows:
                starts[matrix] = action[START]
        return Setting(tuple(widths), tuple(starts), tuple(scales))

    def rows_changed(self, matrix: int, now: Setting, then: Setting) -> int:
        """Rows that leave or arrive."""
        before = self.components(matrix, now.widths[matrix], now.starts[matrix])
        after = self.components(matrix, then.widths[matrix], then.starts[matrix])
        return len(set(before) ^ set(after))

    def _limited(self, wanted: Setting, now: Setting, hold_M: Tensor) -> Setting:
        """At most `max_switched` of the rows: matrices that hold least go first."""
        room = self.config.max_switched * sum(now.widths)
        widths, starts, scales = list(now.widths), list(now.starts), list(now.scales)
        for matrix in sorted(range(len(self.shapes)), key=lambda m: (float(hold_M[m]), m)):
            changed = self.rows_changed(matrix, now, wanted)
            if changed > room:
                continue
            room -= changed
            widths[matrix], starts[matrix], scales[matrix] = wanted.of_matrix(matrix)
        return Setting(tuple(widths), tuple(starts), tuple(scales))

    def _affordable(self, wanted: Setting, logits: Logits, budget: int) -> Setting:
        if len(self.space.widths) > 1:
            preferences = logits.width_MW.double().log_softmax(1).tolist()
        else:
            preferences = self._warm_preferences()
        return Setting(
            tuple(self._afford(wanted.widths, preferences, budget)), wanted.starts, wanted.scales
        )

    def learn(
        self,
        features_MF: Tensor,
        decisions: Sequence[Decision],
        rewards: Sequence[float],
        credit_M: Tensor,
        progress: float,
    ) -> Learnt:
        """Learn from one decision, or from a group of candidates for the same moment."""
        weight = entropy_weight(self.config.policy.entropy, min(progress, 1.0))
        if len(decisions) > 1:
            told = [torch.full_like(credit_M, a) for a in group_advantages(rewards)]
        else:
            told = [self._advantage(rewards[0], credit_M)]
        group = [
            Experience(features_MF, d.actions_M4, d.log_prob_M, advantage.float(), reward)
            for d, advantage, reward in zip(decisions, told, rewards, strict=True)
        ]
        return self.learner.update(group, weight)

    def _advantage(self, reward: float, credit_M: Tensor) -> Tensor:
        """The matrix's own credit per parameter among all, and the reward among those before."""
        costs = [cost(self.config.param, s, 1) for s in self.shapes]
        per_parameter = credit_M / torch.tensor(costs, dtype=torch.float64)
        spread = float(per_parameter.std(unbiased=False))
        own = (per_parameter - per_parameter.mean()) / spread if spread > 0 else 0 * credit_M
        mean, variance, count = self.reward.tolist()
        deviation = variance**0.5
        shared = (reward - mean) / deviation if count > 1 and deviation > 0 else 0.0
        keep = SMOOTH if count else 0.0
        mean = keep * mean + (1 - keep) * reward
        variance = keep * variance + (1 - keep) * (reward - mean) ** 2
        self.reward = torch.tensor([mean, variance, count + 1], dtype=torch.float64)
        share = self.config.credit_weight
        return share * own + (1 - share) * shared

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors whose shapes do not change."""
        return {
            **{f"learner/{name}": tensor for name, tensor in self.learner.state().items()},
            "generator": self.generator.get_state(),
            "reward": self.reward.clone(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        own = {n.removeprefix("learner/"): t for n, t in state.items() if n.startswith("learner/")}
        self.learner.load(own)
        self.generator.set_state(state["generator"])
        self.reward = state["reward"].clone()
