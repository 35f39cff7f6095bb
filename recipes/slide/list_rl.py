"""Stage `list_rl`: the student's own lists, drawn in groups, are made likelier if they are better.

Group-relative policy gradient (GRPO, Shao et al. 2024), on the policy that drew the lists: each list of
a group counts by its reward less the group's mean, in standard deviations, so a group whose lists are
all alike teaches nothing. Few lists hit the one target, so the reward also has what a list shares with
the teacher's, and the teacher's own list may stand in the group (`inject`).

A reward is a sum over places, so an item need not answer for those before it: with `credit=place` its
log-probability is weighed by what its place and later ones gave (the policy gradient's reward to go).

B histories, G lists of each, K items of a list, M of a teacher's list, L levels, C codes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from configs.values import at_least, one_of
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

CREDITS = ("list", "place")
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
    graded: float = 0.0
    """Weight of a list's NDCG with the teacher's shares as gains: the softmax of the scores of all items
    of its exported list, which may be longer than the student's."""
    flatness: float = 1.0
    """Temperature of this softmax."""
    credit: str = "list"
    """What an item answers for: list (the reward of the whole list) or place (of its and later ones)."""
    inject: bool = False
    """Let the teacher's list take the place of one of a group."""
    kl: float = 0.02
    """Weight of the distance to the student that it began as."""

    def __post_init__(self) -> None:
        ListDistillConfig.__post_init__(self)
        at_least("task.group", self.group, 2)
        for name in ("ndcg", "overlap", "graded", "kl"):
            at_least(f"task.{name}", getattr(self, name), 0)
        if not self.flatness > 0:
            raise ValueError(f"task.flatness={self.flatness}: set task.flatness above 0")
        one_of("task.credit", self.credit, CREDITS)


def rewards(
    lists_BGK: Tensor,
    targets_B: Tensor,
    teachers_BM: Tensor,
    scores_BM: Tensor,
    config: ListRlConfig,
) -> Tensor:
    """What each place gives (B, G, K); a list's reward is their sum. Target NOTHING: nobody knows it."""
    K = lists_BGK.shape[2]
    there_BGK = lists_BGK != NOTHING
    gain_K = 1 / torch.arange(2, K + 2, device=lists_BGK.device).log2()
    hit_BGK = (lists_BGK == targets_B[:, None, None]) & there_BGK
    same_BGKM = (lists_BGK[..., None] == teachers_BM[:, None, None]) & there_BGK[..., None]
    shared_BGK = same_BGKM[..., :K].any(3)
    gave_BGK = config.ndcg * hit_BGK * gain_K + config.overlap * shared_BGK / K
    if config.graded:
        share_BM = (scores_BM.float() / config.flatness).softmax(1)
        best_BK = share_BM.sort(1, descending=True).values[:, :K]
        ideal_B = (best_BK * gain_K[: best_BK.shape[1]]).sum(1)
        share_BGK = (same_BGKM * share_BM[:, None, None]).sum(3)
        gave_BGK = gave_BGK + config.graded * share_BGK * gain_K / ideal_B[:, None, None]
    return gave_BGK


def advantages(gave_BGK: Tensor, credit: str) -> Tensor:
    """For each item (B, G, K), in standard deviations of the group's rewards; 0 where they are equal."""
    reward_BG1 = gave_BGK.sum(2, keepdim=True)
    deviation_B11 = reward_BG1.std(1, keepdim=True, correction=0)
    to_go_BGK = reward_BG1.expand_as(gave_BGK)
    if credit == "place":
        to_go_BGK = gave_BGK.flip(2).cumsum(2).flip(2)
    centered_BGK = to_go_BGK - to_go_BGK.mean(1, keepdim=True)
    return (centered_BGK / (deviation_B11 + EPSILON)).masked_fill(deviation_B11 <= EPSILON, 0.0)


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

    def _items_read(self, beams: int) -> int:
        return beams if self.config.graded else super()._items_read(beams)

    def _collate_training(self, samples: Sequence[Any]) -> dict[str, Any]:
        M = max(self.model_config.list_length, *(len(sample.list_K) for sample in samples))
        teachers_BM = np.full((len(samples), M), NOTHING, dtype=np.int64)
        scores_BM = np.full((len(samples), M), -np.inf, dtype=np.float32)
        for items_M, scores_M, sample in zip(teachers_BM, scores_BM, samples, strict=True):
            items_M[: len(sample.list_K)] = sample.list_K
            scores_M[: len(sample.list_K)] = sample.scores_K
        longest = self.model_config.max_history
        return {
            "histories_BH": pad_left([sample.history for sample in samples], longest),
            "targets_B": torch.tensor([sample.target for sample in samples]),
            "teachers_BM": torch.from_numpy(teachers_BM),
            "scores_BM": torch.from_numpy(scores_BM),
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
        histories_NH, teachers_BM = histories_BGH.flatten(0, 1), batch["teachers_BM"]
        K = self.model_config.list_length
        lists_BGK = self._draw(model, trie, histories_NH, teachers_BM[:, :K])
        gave_BGK = rewards(lists_BGK, batch["targets_B"], teachers_BM, batch["scores_BM"], config)
        advantage_BGK = advantages(gave_BGK, config.credit)
        self._seen.groups += len(gave_BGK)
        self._seen.equal += (advantage_BGK == 0).all(2).all(1).sum()
        self._seen.reward += gave_BGK.sum(2).mean(1).sum()

        lists_NK = lists_BGK.flatten(0, 1)
        own_NKL = self._log_probabilities(model, trie, histories_NH, lists_NK)
        with torch.no_grad():
            reference = self._reference(lists_NK.device).model
            begun_NKL = self._log_probabilities(reference, trie, histories_NH, lists_NK)
        apart_NKL = begun_NKL - own_NKL
        distance_NKL = apart_NKL.exp() - apart_NKL - 1  # unbiased, never negative (Schulman 2020)
        gain_NK = advantage_BGK.flatten(0, 1) * own_NKL.sum(2)
        return (config.kl * distance_NKL.sum(2) - gain_NK).sum()

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
