"""What the next-item model trains on: windows of the users' training parts.

    items of a user   a b c d e f g h       histories of at most 4
    window 1          a b c d e             learns b c d e
    window 2              c d e f g         learns         f g
    window 3                  e f g h       learns             h

Each item but a user's first is learnt exactly once, after half of the longest history or more.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.interactions.tables import Ints
from recipes.slide.split import Split


class Window(NamedTuple):
    """Items, and which of them are learnt."""

    items_N: Ints
    learnt_N: NDArray[np.bool_]


@dataclass(frozen=True)
class Windows:
    """The windows of these users."""

    split: Split
    users: Ints
    max_history: int
    ids: str
    """Fingerprint of the semantic IDs: with others, samples would be others."""

    @cached_property
    def rows(self) -> Ints:
        """First interaction, end, and first learnt interaction of each window."""
        H, rows = self.max_history, []
        for user in self.users.tolist():
            start, end = int(self.split.sequences.starts_X[user]), int(self.split.train_ends[user])
            begin, learnt = start, start + 1
            while learnt < end:
                stop = min(begin + H + 1, end)
                rows.append((begin, stop, learnt))
                learnt = stop
                begin += max(H // 2, 1)
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Window:
        begin, end, learnt = self.rows[index].tolist()
        return Window(self.split.sequences.items_E[begin:end], np.arange(begin, end) >= learnt)

    def fingerprint(self) -> str:
        """Of sequences, IDs, and how they are cut."""
        cut = hashlib.sha256(np.ascontiguousarray(self.rows, dtype="<i8").tobytes()).hexdigest()[
            :16
        ]
        return f"{self.split.sequences.fingerprint} {self.ids} {cut}"
