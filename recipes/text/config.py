"""The `data` node of tasks on text: sources, mixtures of them, and how sequences are made."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.values import at_least, one_of

PACKING = ("stream", "whole", "none")
LONG_DOCUMENTS = ("split", "truncate", "drop")


@dataclass(kw_only=True)
class SourceConfig:
    """Where documents come from."""

    files: list[str] | None = None
    """Local globs (** works); .gz and .zst are unpacked. null: what comes with Python's own library."""
    dataset: str | None = None
    """Instead of files: a dataset of the hub, where there is a network, or a local folder of one."""
    subset: str | None = None
    """The dataset's configuration of that name."""
    split: str = "train"
    """The dataset's split."""
    format: str = "auto"
    """auto: by the file's name; or jsonl, parquet, text (task pretrain), docstrings (task sft)."""

    def check(self, key: str) -> None:
        """Raise `ValueError` for what cannot be; `key` is the node's name."""
        if self.files == [] and self.dataset is None:
            raise ValueError(
                f"{key}.files is empty: set {key}.files to globs of files, such as "
                f"'{key}.files=[corpus/**/*.txt]', or {key}.dataset"
            )
        if self.files and self.dataset is not None:
            raise ValueError(f"{key}.files and {key}.dataset are both set: set one of them to null")


def weight_of(source: SourceConfig) -> float:
    """A source's weight in its mixture; one that stands alone has 1."""
    return float(getattr(source, "weight", 1.0))


@dataclass(kw_only=True)
class SequencesConfig(SourceConfig):
    """A source, or a mixture of them, and the sequences that are made of the documents."""

    mixture: dict[str, Any] = field(default_factory=dict)
    """Several sources by name instead of one: each has the keys above that describe a source, and a
    weight, its share of the training sequences (0: evaluated only). +data.mixture.NAME.weight=2"""
    tokenizer: str | None = None
    """Folder of a transformers tokenizer; null: bytes."""
    sequence_length: int = 256
    """Tokens a sequence."""
    packing: str = "stream"
    """stream: documents one after the other, cut where a sequence ends; whole: only documents that fit
    are put together, the rest is padding; none: one document a sequence, padded."""
    long_documents: str = "split"
    """What happens to documents longer than a sequence: split, truncate (keep the beginning), drop."""
    holdout: float = 0.05
    """Share of each source's documents that evaluation uses and training never sees."""
    max_bad_rows: int = 0
    """Rows of each source that may be skipped because they cannot be used; one more is an error."""
    cache_dir: str = "~/.cache/springtide"
    """Where tokenized corpora are kept; on many nodes, a folder that every node sees or its own."""

    part: ClassVar[type[SourceConfig]]
    """The type of a mixture's source, which has a `weight`."""

    def __post_init__(self) -> None:
        if not self.mixture:
            self.check("data")
        elif self.files or self.dataset is not None:
            raise ValueError(
                "data.mixture and a single source are both set: set data.files and data.dataset to null"
            )
        at_least("data.sequence_length", self.sequence_length, 2)
        one_of("data.packing", self.packing, PACKING)
        one_of("data.long_documents", self.long_documents, LONG_DOCUMENTS)
        at_least("data.max_bad_rows", self.max_bad_rows, 0)
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout={self.holdout}: set data.holdout to 0 or more, below 1")
        weights = [weight_of(source) for source in self.sources().values()]
        if not any(weights):
            raise ValueError(
                "every source of data.mixture has weight 0: set data.mixture.NAME.weight above 0 for "
                "one that is trained on"
            )

    def sources(self) -> dict[str, SourceConfig]:
        """Every source by the node that describes it. Raises `ValueError`."""
        if not self.mixture:
            return {"data": self}
        return {
            f"data.mixture.{name}": self._part(name, values)
            for name, values in self.mixture.items()
        }

    def _part(self, name: str, values: Any) -> SourceConfig:
        key = f"data.mixture.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"{key}: name a source with letters, digits, - and _ only")
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{key}={values} is no group of keys: set {key}.files, {key}.weight ..."
            )
        for given in values:
            one_of(f"a key of {key}", str(given), [f.name for f in fields(self.part)])
        try:
            merged = OmegaConf.merge(OmegaConf.structured(self.part), dict(values))
            made = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise ValueError(f"{key}: {str(error).splitlines()[0]}") from error
        assert isinstance(made, SourceConfig)
        made.check(key)
        if not 0 <= (weight := weight_of(made)) < math.inf:
            raise ValueError(f"{key}.weight={weight}: set {key}.weight to a number of 0 or more")
        return made


@dataclass(kw_only=True)
class TextPart(SourceConfig):
    """One source of a mixture of texts."""

    text_key: str = "text"
    weight: float = 1.0


@dataclass(kw_only=True)
class TextConfig(SequencesConfig):
    """The `data` node of task `pretrain`."""

    text_key: str = "text"
    """The field that holds the text, where there are rows with fields."""

    part: ClassVar[type[SourceConfig]] = TextPart
