"""Rows of a study: lists of all users, what validation chooses, and the figures that are kept.

X users, K items of a list
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.slide.plan import Plan
from benchmarks.slide.scored import Found, scored
from models.slide.folder import Exported
from models.slide.history import NOTHING, pad_left
from recipes.interactions.tables import Ints
from recipes.slide.counts import COOCCURRENCE, Counts
from recipes.slide.data import Data
from recipes.slide.metrics import gains, places
from recipes.slide.rows import Row, decoder, parse_row, reordered
from recipes.slide.shards import Rows


@dataclass
class Judging:
    """Models by name, and the rows that were found with them."""

    data: Data
    plan: Plan
    device: torch.device
    say: Callable[[str], None]
    models: dict[str, list[Exported]] = field(default_factory=dict)
    rows: list[Found] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def ensemble(self) -> None:
        """Of all teachers, and those with heads: what is best on validation."""
        kinds = {"heads": ("heads",), "all": ("steps", "heads")}
        figures: dict[str, float] = {}
        chosen = self.some_users()
        targets = self.targets("validation")[chosen]
        for kind, codes in kinds.items():
            self.models[kind] = [
                self.models[name][0] for name, row in self.plan.teachers.items() if row[1] in codes
            ]
            row = parse_row(f"{kind}:beam{self.plan.beams}", self.models)
            items, _ = self.decode(row, "validation", new=True, chosen=chosen)
            figures[kind] = float(gains(places(items[:, :10], targets), 10)["ndcg@10"].mean())
        best = max(figures, key=lambda kind: figures[kind])
        self.models["e"] = self.models[best]
        self.about["ensemble"] = {
            "chosen": best, "validation ndcg@10": figures,
            "models": [exported.fingerprint for exported in self.models["e"]],
        }  # fmt: skip
        for kind in kinds:
            del self.models[kind]

    def some_users(self) -> list[int]:
        """Of validation, evenly, as many as the plan says."""
        users = self.data.sequences.num_users
        stride = max(1, users // self.plan.eval_users)
        return list(range(0, users, stride))[: self.plan.eval_users]

    def counted(self, name: str) -> None:
        """Rows of beam search with and without counts, from one search."""
        table = Counts(self.data.split, *COOCCURRENCE)
        row = parse_row(f"{name}:beam{self.plan.beams}", self.models)
        histories = self.histories("validation")
        items, scores = self.decode(row, "validation", new=True)
        targets = self.targets("validation")
        figures = {
            alpha: float(gains(places(
                reordered(items, scores, histories, table, alpha, self.device)[:, : self.plan.length],
                targets,
            ), 10)["ndcg@10"].mean())
            for alpha in self.plan.alphas
        }  # fmt: skip
        alpha = max(figures, key=lambda a: figures[a])
        self.about[f"counts of {name}"] = {"chosen": alpha, "validation ndcg@10": figures}
        histories = self.histories("test")
        plain: dict[str, Ints] = {}
        counted: dict[str, Ints] = {}
        for kind in ("raw", "new"):
            items, scores = self.decode(row, "test", new=kind == "new")
            plain[kind] = items[:, : self.plan.length]
            again = reordered(items, scores, histories, table, alpha, self.device)
            counted[kind] = again[:, : self.plan.length]
        if name != "s":
            self.add(row.text, plain)
        self.add(f"{row.text}+counts", counted)

    def histories(self, part: str) -> list[Ints]:
        """Of all users, before their targets."""
        split = self.data.split
        return [split.history(x, int(e)) for x, e in enumerate(split.targets(part))]

    def targets(self, part: str) -> Ints:
        """Of all users."""
        split = self.data.split
        targets: Ints = split.sequences.items_E[split.targets(part)]
        return targets

    def decode(
        self, row: Row, part: str, new: bool, chosen: Sequence[int] | None = None
    ) -> tuple[Ints, np.ndarray]:
        """Items and scores of all users or some, as many as there are beams."""
        histories = self.histories(part)
        if chosen is not None:
            histories = [histories[user] for user in chosen]
        decode = decoder(row, self.models[str(row.model)], self.plan.length)
        longest = max(map(len, histories)) if new else 0
        items, scores = [], []
        for begin in range(0, len(histories), self.plan.batch):
            of = histories[begin : begin + self.plan.batch]
            found = decode(
                pad_left(of, self.plan.max_history).to(self.device),
                pad_left(of, min(longest, max(map(len, of)))).to(self.device),
            )
            items.append(found.items_BK.cpu().numpy())
            scores.append(found.scores_BK.float().cpu().numpy())
        return np.concatenate(items), np.concatenate(scores)

    def shared(self, name: str, rows: Rows, limit: int) -> float:
        """What share of these lists' items the model's have, in any order; of rows evenly taken."""
        chosen = np.unique(np.linspace(0, len(rows.users_R) - 1, limit).astype(np.int64))
        row = parse_row(f"{name}:greedy", self.models)
        decode = decoder(row, self.models[name], self.plan.length)
        hit: list[float] = []
        for begin in range(0, len(chosen), self.plan.batch):
            part = chosen[begin : begin + self.plan.batch]
            padded = pad_left([rows.histories[n] for n in part.tolist()], self.plan.max_history)
            padded = padded.to(self.device)
            own_BK = decode(padded, padded[:, :0]).items_BK.cpu().numpy()
            theirs_BK = rows.items_RK[part, : self.plan.length]
            hit += (own_BK[:, :, None] == theirs_BK[:, None]).any(2).mean(1).tolist()
        return float(np.mean(hit))

    def judge(self, text: str) -> None:
        """One row's lists on the test targets."""
        row = parse_row(text, self.models)
        lists = {
            kind: self.decode(row, "test", new=kind == "new")[0][:, : self.plan.length]
            for kind in ("raw", "new")
        }
        self.add(text, lists)

    def add(self, text: str, lists: Mapping[str, Ints]) -> None:
        """Keep a row's figures and every user's place."""
        padded = {
            kind: np.pad(
                found, ((0, 0), (0, self.plan.length - found.shape[1])), constant_values=NOTHING
            )
            for kind, found in lists.items()
        }
        found = scored(text, padded, self.data.split, "test")
        self.rows.append(found)
        figures = {k: {n: round(v, 4) for n, v in of.items() if n.startswith(("recall@10", "ndcg@10"))}
                   for k, of in found["figures"].items()}  # fmt: skip
        self.say(f"  {text}: {figures}")
