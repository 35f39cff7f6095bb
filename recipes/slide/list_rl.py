"""Stage `list_rl`: the student's own lists, drawn in groups, are made likelier if they are better.

Group-relative policy gradient (GRPO, Shao et al. 2024), on the policy that drew the lists: each list of
a group counts by its reward less the group's mean, in standard deviations, so a group whose lists are
all alike teaches nothing. Few lists hit the one target, so the reward also has what a list shares with
the teacher's, and the teacher's own list may stand in the group (`inject`).

B histories, G lists of each, K items of a list, L levels, C codes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from configs.values import at_least
from models.slide.config import SlideConfig
from models.slide.decode import allowed_along, greedy_list
from models.slide.folder import Exported
from models.slide.history import NOTHING, pad_left
from models.slide.model import training_inputs
from models.slide.trie import Trie
from recipes.slide.config import SequencesConfig
from recipes.slide.list_distill import ListDistillConfig, ListDistillTask
from recipes.slide.teachers import load_model
from recipes.task import Batch, DataError

EPSILON = 1e-4
"""A group whose rewards differ by less is one of equal lists."""


@dataclass(kw_only=True)
class ListRlConfig(ListDistillConfig):
    """The `task` node. `lists` are the teacher's, `teacher` is the student to begin with."""

    name: str = "list_rl"
    group: int = 8
    """Lists of a history."""
    temperature: float = 1.0
    """At which they are drawn."""
    ndcg: float = 1.0
    """Weight of a list's NDCG for the item that really followed."""
    overlap: float = 0.5
    """Weight of the share of its items that the teacher's list has."""
    inject: bool = False
    """Let the teacher's list take the place of one of a group."""
    kl: float = 0.02
    """Weight of the distance to the student that it began as."""

    def __post_init__(self) -> None:
        ListDistillConfig.__post_init__(self)
        at_least("task.group", self.group, 2)
        for name in ("ndcg", "overlap", "kl"):
            at_least(f"task.{name}", getattr(self, name), 0)


def rewards(
    lists_BGK: Tensor, targets_B: Tensor, teachers_BK: Tensor, ndcg: float, overlap: float
) -> Tensor:
    """(B, G)."""
    K = lists_BGK.shape[2]
    gain_K = 1 / torch.arange(2, K + 2, device=lists_BGK.device).log2()
    hit_BGK = lists_BGK == targets_B[:, None, None]
    shared_BGK = (lists_BGK[..., None] == teachers_BK[:, None, None]).any(3) & (
        lists_BGK != NOTHING
    )
    return ndcg * (hit_BGK * gain_K).sum(2) + overlap * shared_BGK.float().mean(2)


def advantages(reward_BG: Tensor) -> Tensor:
    """In standard deviations of the group; 0 where a group's rewards are equal."""
    centered_BG = reward_BG - reward_BG.mean(1, keepdim=True)
    deviation_B1 = reward_BG.std(1, keepdim=True, correction=0)
    return (centered_BG / (deviation_B1 + EPSILON)).masked_fill(deviation_B1 <= EPSILON, 0.0)


@dataclass
class Seen:
    """What this rank's groups were like since the last evaluation."""

    groups: float = 0.0
    equal: Tensor | float = field(default=0.0)
    reward: Tensor | float = field(default=0.0)


class ListRlTask(ListDistillTask):
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": ListRlConfig,
        "model": SlideConfig,
        "data": SequencesConfig,
    }

    def _check_list_length(self) -> None:
        super()._check_list_length()
        if self.config.source != "lists":
            raise ValueError("list_rl compares with a teacher's lists: set task.source=lists")
        if self.config.teacher is None:
            raise ValueError(
                "task.teacher is null: set task.teacher to the exported student that it begins with"
            )
        self._seen = Seen()
        self.begun: dict[torch.device, Exported] = {}

    def check(self) -> None:
        """As for a student; and a list must not be longer than there are items to draw."""
        super().check()
        assert self._teacher is not None
        if not self._teacher.model.config.list_length:
            raise DataError(
                f"task.teacher={self.config.teacher} writes no lists: set task.teacher to an exported "
                "student of list_distill"
            )
        if self.data.ids.num_items < self.model_config.list_length:
            raise DataError(
                f"model.list_length={self.model_config.list_length} is more than the "
                f"{self.data.ids.num_items} items: set model.list_length to less"
            )

    def _collate_training(self, samples: Sequence[Any]) -> dict[str, Any]:
        K = self.model_config.list_length
        lists_BK = np.full((len(samples), K), NOTHING, dtype=np.int64)
        for row, sample in zip(lists_BK, samples, strict=True):
            row[: len(sample.list_K)] = sample.list_K
        longest = self.model_config.max_history
        return {
            "histories_BH": pad_left([sample.history for sample in samples], longest),
            "targets_B": torch.tensor([sample.target for sample in samples]),
            "teachers_BK": torch.from_numpy(lists_BK),
            "count": float(len(samples) * self.config.group),
        }

    def flops(self, batch: Batch) -> float:
        """Of the pass that learns; drawing is left out."""
        lists = batch["histories_BH"].shape[0] * self.config.group
        tokens = (
            self.model_config.max_history + self.model_config.list_length
        ) * self.data.ids.levels
        return super().flops({"tokens_BT": torch.empty(lists, tokens, device="meta")})

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Minus advantage times log-probability, plus the distance to the start, summed over lists."""
        config, trie = self.config, self._trie(batch["histories_BH"].device)
        histories_BGH = batch["histories_BH"][:, None].expand(-1, config.group, -1)
        histories_NH = histories_BGH.flatten(0, 1)
        lists_BGK = self._draw(model, trie, histories_NH, batch["teachers_BK"])
        reward_BG = rewards(
            lists_BGK, batch["targets_B"], batch["teachers_BK"], config.ndcg, config.overlap
        )
        advantage_BG = advantages(reward_BG)
        self._seen.groups += len(reward_BG)
        self._seen.equal += (advantage_BG == 0).all(1).sum()
        self._seen.reward += reward_BG.mean(1).sum()

        lists_NK = lists_BGK.flatten(0, 1)
        own_NKL = self._log_probabilities(model, trie, histories_NH, lists_NK)
        with torch.no_grad():
            reference = self._reference(lists_NK.device).model
            begun_NKL = self._log_probabilities(reference, trie, histories_NH, lists_NK)
        apart_NKL = begun_NKL - own_NKL
        distance_NKL = apart_NKL.exp() - apart_NKL - 1  # unbiased, never negative (Schulman 2020)
        gain_N = advantage_BG.flatten() * own_NKL.sum((1, 2))
        return (config.kl * distance_NKL.sum((1, 2)) - gain_N).sum()

    @torch.no_grad()
    def _draw(self, model: Any, trie: Trie, histories_NH: Tensor, teachers_BK: Tensor) -> Tensor:
        """(B, G, K); as the model decodes, without dropout."""
        training = model.training
        model.eval()
        K, nobody = self.model_config.list_length, histories_NH[:, :0]
        found = greedy_list([model], trie, histories_NH, K, nobody, noise=self.config.temperature)
        model.train(training)
        lists_BGK = found.items_BK.unflatten(0, (-1, self.config.group))
        if self.config.inject:
            whole_B = (teachers_BK != NOTHING).all(1)
            first_BK = torch.where(whole_B[:, None], teachers_BK, lists_BGK[:, 0])
            lists_BGK = torch.cat([first_BK[:, None], lists_BGK[:, 1:]], dim=1)
        return lists_BGK

    def _log_probabilities(
        self, model: Any, trie: Trie, histories_NH: Tensor, lists_NK: Tensor
    ) -> Tensor:
        """Of the codes of lists (N, K, L), each among the codes that were allowed there."""
        H, L = histories_NH.shape[1], trie.levels
        missing_N = (histories_NH == NOTHING).sum(1)
        # histories first, then lists, then what was missing: no padding inside
        place_T = torch.arange(H + lists_NK.shape[1], device=lists_NK.device)
        joined_NT = torch.cat([histories_NH, lists_NK], dim=1)
        items_NT = joined_NT.gather(1, (place_T + missing_N[:, None]) % len(place_T)).clamp(min=0)
        lists_N = H - missing_N
        codes_NTL = trie.codes_IL[items_NT]
        logits = model(*training_inputs(codes_NTL, trie.sizes, lists_N))
        at_NK = lists_N[:, None] + torch.arange(lists_NK.shape[1], device=lists_NK.device)
        allowed = allowed_along(trie, lists_NK)
        found = []
        for level in range(L):
            C = trie.sizes[level]
            of_list_NKC = logits[level].take_along_dim(at_NK[..., None], dim=1).float()
            of_list_NKC = of_list_NKC / self.config.temperature
            allowed_NKC = torch.stack([row[level] for row in allowed], dim=1)[..., :C]
            logp_NKC = of_list_NKC.masked_fill(~allowed_NKC, float("-inf")).log_softmax(2)
            code_NK1 = trie.codes_IL[lists_NK.clamp(min=0)][..., level, None]
            chosen_NK = logp_NKC.gather(2, code_NK1).squeeze(2)
            found.append(chosen_NK.masked_fill(lists_NK == NOTHING, 0.0))
        return torch.stack(found, dim=2)

    def _reference(self, device: torch.device) -> Exported:
        """The student as it began, whole on every rank."""
        if device not in self.begun:
            self.begun[device] = load_model(str(self.config.teacher), "task.teacher", device)
        return self.begun[device]

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Recall and NDCG; of this rank's groups since the last time, reward and share of equal ones."""
        found, seen = super().summarize(sums), self._seen
        if seen.groups:
            found["reward"] = float(seen.reward) / seen.groups
            found["equal_groups"] = float(seen.equal) / seen.groups
        self._seen = Seen()
        return found

    def _about(self) -> dict[str, Any]:
        return {**super()._about(), "stage": "list_rl"}
