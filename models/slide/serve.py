"""Recommends items to users, from a folder that `python -m trainer.export` wrote.

recommender = Recommender.load("exported")
(list_of_first_user, *_) = recommender.recommend([["50", "181"], ["7"]], length=10)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.slide.decode import Lists, beam_search, greedy_list
from models.slide.folder import Exported, load_folder, numbers_of
from models.slide.history import NOTHING, pad_left

BEAMS = 50
"""Of a model of the next item, if the caller does not say."""


@dataclass(frozen=True)
class Recommender:
    """A model, and the numbers that names of items stand for."""

    exported: Exported
    numbers: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path | str, device: torch.device | str = "cpu") -> "Recommender":
        """Read an exported folder. Raises `ValueError` for one that is none."""
        exported = load_folder(folder, device)
        return cls(exported, numbers_of(exported.names))

    def recommend(
        self,
        histories: Sequence[Sequence[str]],
        length: int = 10,
        beams: int | None = None,
        again: bool = False,
        batch_size: int = 256,
    ) -> list[list[tuple[str, float]]]:
        """For each history of item names, oldest first: the best items and their log-probabilities.

        A list model writes its list in one greedy pass; a model of the next item, or either if `beams`
        is given, is searched with so many beams. Items of the history are left out unless `again`.
        Raises `ValueError` for an empty history and for an item that the model does not know.
        """
        if length < 1 or batch_size < 1 or (beams is not None and beams < length):
            raise ValueError(
                f"length={length}, beams={beams}, batch_size={batch_size}: give 1 or more, and beams of "
                "length or more"
            )
        rows = [self._numbers(user, history) for user, history in enumerate(histories)]
        found: list[list[tuple[str, float]]] = []
        for begin in range(0, len(rows), batch_size):
            found += self._batch(rows[begin : begin + batch_size], length, beams, again)
        return found

    def _numbers(self, user: int, history: Sequence[str]) -> list[int]:
        if not history:
            raise ValueError(f"history {user} is empty: give at least one item")
        for name in history:
            if name not in self.numbers:
                known = f"the model knows {len(self.numbers):,} items"
                raise ValueError(f"item {name} of history {user} is unknown: {known}")
        return [self.numbers[name] for name in history]

    def _batch(
        self, rows: Sequence[list[int]], length: int, beams: int | None, again: bool
    ) -> list[list[tuple[str, float]]]:
        model, trie = self.exported.model, self.exported.trie
        device = trie.device
        items_BH = pad_left(rows, model.config.max_history).to(device)
        exclude_BU = pad_left(rows, 0 if again else max(map(len, rows))).to(device)
        lists: Lists
        if beams is None and model.config.list_length:
            lists = greedy_list([model], trie, items_BH, length, exclude_BU)
        else:
            width = max(beams or BEAMS, length)
            lists = beam_search([model], trie, items_BH, width, exclude_BU)
        pairs = zip(lists.items_BK.tolist(), lists.scores_BK.tolist(), strict=True)
        names = self.exported.names
        return [
            [(names[i], s) for i, s in zip(items, scores, strict=True) if i != NOTHING][:length]
            for items, scores in pairs
        ]
