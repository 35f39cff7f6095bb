"""From samples to what the model reads: histories as whole numbers, padded on the left.

B histories, N items of a history, F features of an item
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.trip.history import Grouping, bucket
from recipes.ctr.samples import Clicks, Sample
from recipes.interactions.tables import Ints


@dataclass(frozen=True)
class View:
    """What a model is to see of a history: how much of it, and where groups and time buckets begin."""

    max_history: int
    grouping: Grouping
    time_edges: Ints
    """Ages in seconds."""

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch of samples."""
        B, N = len(samples), self.max_history
        items_BN, behaviours_BN, ages_BN = (np.zeros((B, N), np.int64) for _ in range(3))
        features_BNF = np.zeros((B, N, len(samples[0].target_features_F)), np.int64)
        for b, sample in enumerate(samples):
            begin = N - len(sample.items_n)
            items_BN[b, begin:] = sample.items_n
            behaviours_BN[b, begin:] = sample.behaviours_n
            ages_BN[b, begin:] = sample.ages_n
            features_BNF[b, begin:] = sample.features_nF
        target_features = np.stack([sample.target_features_F for sample in samples])
        return {
            **self._histories(items_BN, behaviours_BN, ages_BN, features_BNF),
            "target_features_BF": torch.from_numpy(target_features),
            "targets_B": torch.tensor([sample.target for sample in samples]),
            "labels_B": torch.tensor([float(sample.label) for sample in samples]),
            "rows_B": torch.tensor([sample.row for sample in samples]),
            "count": B,
        }

    def at_once(self, clicks: Clicks, rows: Ints) -> dict[str, Any]:
        """What `collate` gives of these samples, made all together."""
        targets = clicks.targets.of(rows)
        return {
            **self._histories(*clicks.padded(rows)),
            "target_features_BF": torch.from_numpy(clicks.table.features_IF[targets.items_T]),
            "targets_B": torch.from_numpy(clicks.vocabulary_I[targets.items_T]),
            "labels_B": torch.from_numpy(targets.labels_T).float(),
            "rows_B": torch.from_numpy(rows),
            "count": len(rows),
        }

    def _histories(
        self, items_BN: Ints, behaviours_BN: Ints, ages_BN: Ints, features_BNF: Ints
    ) -> dict[str, Tensor]:
        arrays = {
            "items_BN": items_BN,
            "behaviours_BN": behaviours_BN,
            "ages_BN": ages_BN,
            "buckets_BN": bucket(ages_BN, self.time_edges),
            "groups_BN": self.grouping(ages_BN),
            "features_BNF": features_BNF,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
