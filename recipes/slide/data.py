"""What every stage reads first, by its configuration."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from models.slide.ids import SemanticIds
from recipes.slide.config import SequencesConfig
from recipes.slide.items import Items
from recipes.slide.sequences import Sequences
from recipes.slide.sids.stored import read_ids
from recipes.slide.sources import read_source
from recipes.slide.split import Split


@dataclass
class Data:
    """Sequences, items and IDs; each is read when first needed."""

    config: SequencesConfig
    sids: str | None = None
    """The folder of `sid_build`."""

    @cached_property
    def _source(self) -> tuple[Sequences, Items]:
        return read_source(self.config)

    @property
    def sequences(self) -> Sequences:
        """What users met."""
        return self._source[0]

    @property
    def items(self) -> Items:
        """What is known of items."""
        return self._source[1]

    @cached_property
    def split(self) -> Split:
        """Training, validation and test."""
        return Split(self.sequences)

    @cached_property
    def ids(self) -> SemanticIds:
        """The items' semantic IDs."""
        assert self.sids is not None
        return read_ids(Path(self.sids), self.items.names)

    @property
    def inputs(self) -> dict[str, str]:
        """Fingerprints for a manifest."""
        found = {"data": self.sequences.fingerprint}
        return found | ({"sids": self.ids.fingerprint} if self.sids is not None else {})

    def describe(self) -> dict[str, str]:
        """Lines for a header."""
        s, config = self.sequences, self.config
        days = {name: rows.mean() for name, rows in self.split.strata("test").items()}
        lines = {
            "data": f"{config.source}: {s.num_users:,} users, {s.num_items:,} items, "
            f"{len(s.items_E):,} interactions"
            + (
                f"; ties permuted by seed {config.permute_ties}"
                if config.permute_ties is not None
                else ""
            ),
            "split": "leave-last-out"
            + (
                f"; {days['same_day']:.0%} of the test targets on the day of the one before"
                if days
                else ""
            ),
        }
        if self.sids is not None:
            lines["ids"] = f"{self.sids}: levels of {', '.join(map(str, self.ids.sizes))} codes"
        return lines
