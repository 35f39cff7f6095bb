"""Weights of the co-occurrence table: all settings at once give what one table at a time does."""

import numpy as np

from benchmarks.slide.counting import Candidates, choose
from recipes.slide.counts import NEAR, NEWEST, Counts
from recipes.slide.metrics import places
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from tests.recipes.slide.stages import PLANTED


def test_places_are_those_in_the_lists_of_the_table():
    split = Split(read_source(PLANTED)[0])
    found = Candidates(split, "validation", 3, 3).places(NEAR, NEWEST)
    counts, lists = Counts(split, 3, 3), []
    for user, event in enumerate(split.targets("validation").tolist()):
        history = split.history(user, event)
        lists.append(counts.top(history, 96, history))
    targets = split.sequences.items_E[split.targets("validation")]
    met = np.array([
        target in split.history(user, event).tolist()
        for user, (event, target) in enumerate(
            zip(split.targets("validation").tolist(), targets.tolist(), strict=True))
    ])  # fmt: skip
    expected = places(np.stack(lists), targets)
    counted = found < 96
    assert counted.sum() > 30
    assert (found[counted] == expected[counted]).all()
    assert not counted[met].any()


def test_the_setting_with_the_best_mean_share_is_chosen():
    split = Split(read_source(PLANTED)[0])
    found = choose({"planted": split})
    best = max(found["tried"], key=lambda row: row["ndcg@10"]["planted"])
    assert (found["pairs"], found["votes"]) == (best["pairs"], best["votes"])
