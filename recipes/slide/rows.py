"""The rows of a comparison: what each recommender is, and its lists for a batch of users.

popularity, markov, cooccurrence    count only
NAME:greedy                         a model's list in one greedy pass
NAME:repeat                         its best item, again and again, without those it had
NAME:beam50                         beam search with 50 beams
NAME:beam50+counts                  the same, reordered by co-occurrence counts as well

A name may stand for several models, whose log-probabilities are averaged, as `beam_export` does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.slide.decode import Lists, beam_search, greedy_list
from models.slide.folder import Exported
from models.slide.history import NOTHING, pad_left
from recipes.interactions.tables import Ints
from recipes.slide.counts import COOCCURRENCE, Counts
from recipes.slide.split import Split

COUNTS = {"popularity": (0, 0), "markov": (1, 1), "cooccurrence": COOCCURRENCE}
"""Window, and how many of the last items vote."""
MODEL_ROW = re.compile(
    r"(?P<model>[\w-]+):(?P<how>greedy|repeat|beam(?P<beams>[1-9]\d*)(?P<counts>\+counts)?)"
)


@dataclass(frozen=True)
class Row:
    """One row, understood."""

    text: str
    model: str | None
    how: str
    beams: int
    counts: bool


def parse_row(text: str, models: Mapping[str, object]) -> Row:
    """Raises `ValueError` for what is no row, or of a model that `models` does not name."""
    if text in COUNTS:
        return Row(text, None, text, 0, False)
    match = MODEL_ROW.fullmatch(text)
    if match is None:
        raise ValueError(
            f"task.rows has {text!r}, which is none of {', '.join(COUNTS)}, NAME:greedy, NAME:repeat, "
            "NAME:beam50 and NAME:beam50+counts"
        )
    if match["model"] not in models:
        raise ValueError(
            f"task.rows has {text!r}, and task.models has {', '.join(models) or 'no model'}: set "
            f"task.models.{match['model']} to its exported folder"
        )
    how = "beam" if match["beams"] else match["how"]
    return Row(text, match["model"], how, int(match["beams"] or 0), match["counts"] is not None)


Recommend = Callable[[Sequence[Ints], Sequence[Ints]], Ints]
"""From whole histories and removed items of some users to their lists (X, K)."""


def recommender(
    row: Row,
    models: Mapping[str, Sequence[Exported]],
    split: Split,
    length: int,
    counts_weight: float,
) -> Recommend:
    """What a row recommends."""
    if row.model is None:
        counts = Counts(split, *COUNTS[row.how])

        def by_counts(histories: Sequence[Ints], removed: Sequence[Ints]) -> Ints:
            pairs = zip(histories, removed, strict=True)
            return np.stack([counts.top(h, length, r) for h, r in pairs])

        return by_counts
    asked = models[row.model]
    longest_history = max(exported.model.config.max_history for exported in asked)
    device = asked[0].trie.device
    table = Counts(split, *COUNTS["cooccurrence"]) if row.counts else None
    decode = decoder(row, asked, length)

    def by_model(histories: Sequence[Ints], removed: Sequence[Ints]) -> Ints:
        longest = max(map(len, removed), default=0)
        found = decode(
            pad_left(histories, longest_history).to(device),
            pad_left(removed, longest).to(device),
        )
        items, scores = found.items_BK.cpu().numpy(), found.scores_BK.float().cpu().numpy()
        if table is not None:
            items = reordered(items, scores, histories, table, counts_weight, device)
        out = np.full((len(items), length), NOTHING, dtype=np.int64)
        out[:, : items.shape[1]] = items[:, :length]
        return out

    return by_model


def decoder(row: Row, asked: Sequence[Exported], length: int) -> Callable[[Tensor, Tensor], Lists]:
    """How a row's models decode histories (B, H) without the excluded items (B, U)."""
    models, trie = [exported.model for exported in asked], asked[0].trie
    beams = max(row.beams, length)
    if row.how == "beam":
        return lambda items_BH, out_BU: beam_search(models, trie, items_BH, beams, out_BU)
    feedback = row.how == "greedy"
    return lambda items_BH, out_BU: greedy_list(models, trie, items_BH, length, out_BU, feedback)


def reordered(
    items_XK: Ints, scores_XK: np.ndarray, histories: Sequence[Ints], table: Counts, weight: float,
    device: torch.device | str = "cpu",
) -> Ints:  # fmt: skip
    """By score plus weight * log(1 + count after the last items)."""
    lasts = pad_left(histories, table.last).numpy()
    total = scores_XK + weight * np.log1p(table.after(lasts, items_XK, device=device))
    return np.take_along_axis(items_XK, np.argsort(-total, axis=1, kind="stable"), axis=1)


@torch.no_grad()
def unconstrained(asked: Sequence[Exported], histories: Sequence[Ints], length: int) -> Ints:
    """What a greedy pass writes if any code may follow: NOTHING for what is no item."""
    models, trie = [exported.model for exported in asked], asked[0].trie
    longest = max(model.config.max_history for model in models)
    padded = pad_left(histories, longest).to(trie.device)
    found = greedy_list(models, trie, padded, length, padded[:, :0], constrain=False)
    return found.items_BK.cpu().numpy()
