"""How the policy learns from what its actions were worth.

    M matrices, F features, P periods that are remembered

| `algo` | the policy's loss, after each period |
|---|---|
| reinforce | -advantage x log-probability of the newest actions |
| ppo | the same with clipped ratios, over the last P periods, several times; a value beside it |
| grpo | as reinforce, over a group of candidates for the same moment, each run for a few steps |

All minus entropy, whose weight falls from the first of two numbers to the second. The learner's state is
tensors whose shapes do not change, so a checkpoint can hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.lelora.actions import entropy, log_prob
from models.lelora.policy import Policy, Verdict

ALGOS = ("reinforce", "ppo", "grpo")
CLIP, EPOCHS, VALUE = 0.2, 4, 0.5
MAX_NORM = 1.0
IMITATIONS = 20
"""Steps on one round of a population: there are few rounds, and each has many runs."""


@dataclass(frozen=True)
class Experience:
    """What was decided once, and what it was worth."""

    features_MF: Tensor
    actions_M4: Tensor
    """As sampled: what the budget made of them is the environment's doing."""
    log_prob_M: Tensor
    """When it was sampled."""
    advantage_M: Tensor
    reward: float


@dataclass(frozen=True)
class Learnt:
    """Figures of an update."""

    policy_loss: float
    entropy: float
    """Of an action, mean over matrices, in nats."""
    value: float
    """The reward that the policy expected."""


class Learner:
    """Adam over a policy, and the last periods."""

    def __init__(
        self, policy: Policy, allowed_MW: Tensor, algo: str, lr: float, periods: int = 8
    ) -> None:
        self.policy, self.allowed_MW, self.algo = policy, allowed_MW, algo
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        self.periods = periods if algo == "ppo" else 0
        self.remembered: list[Experience] = []

    def update(self, group: Sequence[Experience], entropy_weight: float) -> Learnt:
        """Learn from experiences of one moment: one of them, or a group of candidates."""
        if self.algo == "ppo":
            self.remembered = [*self.remembered, *group][-self.periods :]
            for _ in range(EPOCHS):
                found = self._step(self.remembered, entropy_weight, clipped=True)
            return found
        return self._step(group, entropy_weight, clipped=False)

    def imitate(self, group: Sequence[Experience], entropy_weight: float) -> Learnt:
        """Go some steps towards the actions of a group, in the proportion of their advantages."""
        found = Learnt(0.0, 0.0, 0.0)
        for _ in range(IMITATIONS if group else 0):
            found = self._step(group, entropy_weight, clipped=False)
        return found

    def _step(self, batch: Sequence[Experience], weight: float, clipped: bool) -> Learnt:
        losses, entropies, values = [], [], []
        said: dict[int, Verdict] = {}  # a group has seen the same
        for experience in batch:
            seen = experience.features_MF
            if id(seen) not in said:
                said[id(seen)] = self.policy(seen, self.allowed_MW)
            logits, value = said[id(seen)]
            log_prob_M = log_prob(logits, self.policy.space, experience.actions_M4)
            if clipped:
                ratio_M = (log_prob_M - experience.log_prob_M).exp()
                bounded_M = ratio_M.clamp(1 - CLIP, 1 + CLIP)
                gain_M = torch.minimum(
                    ratio_M * experience.advantage_M, bounded_M * experience.advantage_M
                )
                losses.append(VALUE * (value - experience.reward).square() - gain_M.mean())
            else:
                losses.append(-(experience.advantage_M * log_prob_M).mean())
            entropies.append(entropy(logits, self.policy.space).mean())
            values.append(value.detach())
        spread = torch.stack(entropies).mean()
        loss = torch.stack(losses).mean() - weight * spread
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_NORM)
        self.optimizer.step()
        return Learnt(
            float(loss.detach()), float(spread.detach()), float(torch.stack(values).mean())
        )

    def state(self) -> dict[str, Tensor]:
        """Policy, moments and memory, copied."""
        found = {f"policy/{n}": p.detach().clone() for n, p in self.policy.named_parameters()}
        for name, parameter in self.policy.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key}/{name}"] = (
                    moments.get(key, torch.zeros_like(parameter)).detach().clone()
                )
            found[f"step/{name}"] = torch.as_tensor(moments.get("step", 0.0)).clone()
        M, F = len(self.allowed_MW), self.policy.inlet.in_features
        memory = {
            "features": torch.zeros(self.periods, M, F), "log_prob": torch.zeros(self.periods, M),
            "actions": torch.zeros(self.periods, M, 4, dtype=torch.int64),
            "advantage": torch.zeros(self.periods, M), "reward": torch.zeros(self.periods),
        }  # fmt: skip
        for place, e in enumerate(self.remembered):
            memory["features"][place], memory["actions"][place] = e.features_MF, e.actions_M4
            memory["log_prob"][place], memory["advantage"][place] = e.log_prob_M, e.advantage_M
            memory["reward"][place] = e.reward
        found |= {f"memory/{name}": tensor for name, tensor in memory.items()}
        return {**found, "memory/count": torch.tensor(len(self.remembered))}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(state[f"policy/{name}"])
            self.optimizer.state[parameter] = {
                "step": state[f"step/{name}"].clone(),
                "exp_avg": state[f"exp_avg/{name}"].clone(),
                "exp_avg_sq": state[f"exp_avg_sq/{name}"].clone(),
            }
        memory = {n.removeprefix("memory/"): t for n, t in state.items() if n.startswith("memory/")}
        self.remembered = [
            Experience(
                memory["features"][n].clone(), memory["actions"][n].clone(),
                memory["log_prob"][n].clone(), memory["advantage"][n].clone(),
                float(memory["reward"][n]),
            )
            for n in range(int(memory["count"]))
        ]  # fmt: skip


def entropy_weight(between: Sequence[float], progress: float) -> float:
    """Falls geometrically from the first to the second number over the run."""
    first, last = between
    if min(first, last) <= 0:
        return first + (last - first) * progress
    return float(first * (last / first) ** progress)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Each candidate's reward against its group: (R - mean) / deviation; 0 where all are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / deviation if deviation > 1e-12 else 0.0 for r in rewards]
