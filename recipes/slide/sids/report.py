"""How good semantic IDs are, before any model is trained on them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.interactions.tables import Ints
from recipes.slide.items import Items
from recipes.slide.sids.collisions import number_groups
from recipes.slide.sids.kmeans import squared_distances

PAIRS, PROBES, NEIGHBOURS = 20_000, 1_000, 10


def gini(loads: Ints) -> float:
    """0 if all loads are alike, nearly 1 if one has all."""
    if not len(loads) or not loads.sum():
        return 0.0
    ordered = np.sort(loads)
    place = np.arange(1, len(loads) + 1)
    return float((2 * place - len(loads) - 1) @ ordered / (len(loads) * ordered.sum()))


def report(before_IL: Ints, codes_IL: Ints, sizes: tuple[int, ...], items: Items,
           features_ID: Tensor | None, seed: int) -> dict[str, Any]:  # fmt: skip
    """Figures of IDs: before and after the collision policy.

    `levels`: of each, codes, those in use, the exponential of their entropy, and the Gini index of their
    loads. `jaccard`: of the attributes of two items that share their first two codes, and of any two.
    `neighbours`: the share of an item's nearest items (by features) that have its first code.
    """
    _, distinct_before = number_groups(before_IL)
    _, distinct = number_groups(codes_IL)
    found: dict[str, Any] = {
        "items": len(codes_IL),
        "ids_before": len(distinct_before),
        "ids": len(distinct),
        "items_of_fullest_id_before": int(distinct_before.max()),
        "items_of_fullest_id": int(distinct.max()),
        "collision_rate_before": float(1 - len(distinct_before) / len(codes_IL)),
        "collision_rate": float(1 - len(distinct) / len(codes_IL)),
        "levels": [_level(codes_IL[:, level], size) for level, size in enumerate(sizes)],
    }
    generator = np.random.default_rng(seed)
    if items.attributes is not None and codes_IL.shape[1] >= 2:
        found["jaccard"] = _jaccards(codes_IL, items, generator)
    if features_ID is not None:
        found["neighbours"] = _neighbours(codes_IL[:, 0], features_ID, generator)
    return found


def _level(code_I: Ints, size: int) -> dict[str, float]:
    loads = np.bincount(code_I, minlength=size).astype(np.int64)
    shares = loads[loads > 0] / loads.sum()
    return {
        "codes": size,
        "used": int((loads > 0).sum()),
        "perplexity": float(np.exp(-(shares * np.log(shares)).sum())),
        "gini": gini(loads),
        "largest_load": float(loads.max() / loads.sum()),
    }


def _jaccards(
    codes_IL: Ints, items: Items, generator: np.random.Generator
) -> dict[str, float | None]:
    assert items.attributes is not None
    sets = [set(names) for names in items.attributes]
    prefix_I, counts = number_groups(codes_IL[:, :2])
    order = np.argsort(prefix_I, kind="stable")
    starts = np.cumsum(counts) - counts
    first = generator.integers(len(sets), size=PAIRS)
    among = counts[prefix_I[first]]
    second = order[starts[prefix_I[first]] + generator.integers(among)]
    any_other = generator.integers(len(sets), size=PAIRS)
    pairs = {"same_first_two_codes": second, "any_two": any_other}
    return {name: _jaccard(sets, first, others) for name, others in pairs.items()}


def _jaccard(sets: list[set[str]], first: Ints, second: Ints) -> float | None:
    values = [
        len(sets[a] & sets[b]) / len(sets[a] | sets[b])
        for a, b in zip(first, second, strict=True)
        if a != b and (sets[a] or sets[b])
    ]
    return float(np.mean(values)) if values else None


def _neighbours(first_I: Ints, features_ID: Tensor, generator: np.random.Generator) -> float:
    probes = generator.permutation(len(first_I))[:PROBES]
    distance = squared_distances(features_ID[torch.from_numpy(probes)], features_ID)
    distance[torch.arange(len(probes)), torch.from_numpy(probes)] = float("inf")
    near = distance.topk(min(NEIGHBOURS, len(first_I) - 1), largest=False).indices.numpy()
    return float((first_I[near] == first_I[probes][:, None]).mean())
