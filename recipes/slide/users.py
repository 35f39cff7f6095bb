"""Users as evaluation meets them: a history, and the item that followed."""

from dataclasses import dataclass
from typing import NamedTuple

from recipes.interactions.tables import Ints
from recipes.slide.split import Split


class User(NamedTuple):
    """One user of one part."""

    number: int
    history: Ints
    """The newest items before the target, oldest first."""
    target: int
    max_history: int


@dataclass(frozen=True)
class Users:
    """All users of `validation` or `test`."""

    split: Split
    part: str
    max_history: int

    def __len__(self) -> int:
        return self.split.sequences.num_users

    def __getitem__(self, number: int) -> User:
        event = int(self.split.targets(self.part)[number])
        history = self.split.history(number, event)[-self.max_history :]
        return User(number, history, int(self.split.sequences.items_E[event]), self.max_history)

    def fingerprint(self) -> str:
        """Of sequences and part."""
        return f"{self.split.sequences.fingerprint} {self.part} {self.max_history}"
