"""The data of a click model in words: for the header of a run and for `inspect_data`."""

from collections.abc import Iterator

import numpy as np

from models.trip.history import bucket
from recipes.ctr.batches import View
from recipes.ctr.figures import group_names, seconds
from recipes.ctr.samples import Clicks, Sample
from recipes.ctr.table import Interactions
from recipes.ctr.targets import Split


def table_in_words(name: str, table: Interactions) -> str:
    """How much there is of a table."""
    F = table.features_IF.shape[1]
    features = f" with {F} features of {table.features_IF.max():,} values" if F else ""
    return (
        f"{name}: {len(table.user_names):,} users, {len(table.item_names):,} items{features}, "
        f"{len(table.times_E):,} interactions"
    )


def targets_in_words(parts: Split) -> str:
    """How many targets each part has."""
    sizes = [len(part) for part in (parts.train, parts.validation, parts.test)]
    shown = "{:,} train, {:,} validation, {:,} test".format(*sizes)
    return f"{shown}; {parts.train.labels_T.mean():.1%} clicks in training"


def groups_in_words(view: View) -> str:
    """How many temporal groups there are, and which."""
    return f"{view.grouping.count}: {', '.join(group_names(view.grouping))}"


def histories_in_words(clicks: Clicks) -> str:
    """How long histories are."""
    quartiles = np.quantile(clicks.lengths(), [0.25, 0.5, 0.75]).astype(int)
    return "quartiles {}, {}, {} of at most ".format(*quartiles) + f"{clicks.max_history}"


def sample_in_words(sample: Sample, view: View) -> Iterator[str]:
    """The target, then the history, newest first."""
    groups_n = view.grouping(sample.ages_n)
    buckets_n = bucket(sample.ages_n, view.time_edges)
    yield f"item {sample.target}, {'click' if sample.label else 'no click'}"
    rows = zip(sample.items_n, sample.behaviours_n, sample.ages_n, groups_n, buckets_n, strict=True)
    for item, behaviour, age, group, at in reversed(list(rows)):
        yield (
            f"item {item}, behaviour {behaviour}, {seconds(age)} before: group {group}, time bucket {at}"
        )
