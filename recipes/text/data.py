"""The data of a task on text, from its configuration to what is trained and evaluated on."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from recipes.task import DataError
from recipes.text.config import SequencesConfig, SourceConfig, weight_of
from recipes.text.corpus import find
from recipes.text.documents import Encoder
from recipes.text.mixture import Interleaved, Mixture, epoch_counts
from recipes.text.packing import Sequences
from recipes.text.store import Corpus, TokenFile, tokenized


@dataclass(frozen=True)
class Part:
    """One source, tokenized."""

    name: str
    """The configuration node, `data` for a source that stands alone."""
    words: str
    """What it is, for the header."""
    weight: float
    corpus: Corpus

    @property
    def short_name(self) -> str:
        """The name that the user gave."""
        return self.name.rpartition(".")[2]


class TextData:
    """Everything that is trained and evaluated on; `encoder_of` makes documents of a source's rows."""

    def __init__(
        self,
        config: SequencesConfig,
        encoder_of: Callable[[SourceConfig], Encoder],
        *,
        end: int,
        seed: int,
        library: str,
    ) -> None:
        cache = Path(os.environ.get("SPRINGTIDE_CACHE", config.cache_dir)).expanduser()
        self.config, self.end, self.seed = config, end, seed
        self.parts: list[Part] = []
        for key, described in config.sources().items():
            source = find(key, described)
            corpus = tokenized(
                source, encoder_of(described), config.holdout, config.max_bad_rows, cache
            )
            self.parts.append(Part(key, source.words(library), weight_of(described), corpus))

    @cached_property
    def train(self) -> Mixture:
        """The training sequences, in an order that the seed decides."""
        sources = [self._sequences(part.corpus.train, self.seed) for part in self.parts]
        for part, source in zip(self.parts, sources, strict=True):
            if part.weight and not len(source):
                raise DataError(self._nothing(part))
        counts = epoch_counts([len(source) for source in sources], [p.weight for p in self.parts])
        return Mixture(sources, counts)

    @cached_property
    def held_out(self) -> Interleaved | None:
        """The held-out sequences of all sources, or None if there are none."""
        parts = [part.corpus.held_out for part in self.parts]
        held_out = Interleaved([self._sequences(part, None) for part in parts])
        return held_out if len(held_out) else None

    def _sequences(self, part: TokenFile, seed: int | None) -> Sequences:
        config = self.config
        return Sequences(
            part, config.sequence_length, self.end, seed, config.packing, config.long_documents
        )

    def _nothing(self, part: Part) -> str:
        """Why a source gives nothing to train on."""
        documents = len(part.corpus.train.starts) - 1
        if documents:
            return (
                f"all {documents:,} documents in {part.words} are longer than "
                f"data.sequence_length={self.config.sequence_length} and dropped: set "
                "data.sequence_length, or data.long_documents=truncate"
            )
        held_out = len(part.corpus.held_out.starts) - 1
        skipped = f", {part.corpus.bad_rows} rows skipped" if part.corpus.bad_rows else ""
        return (
            f"no text to train on in {part.words} ({held_out} documents held out{skipped}): set "
            f"{part.name}.files, or data.holdout=0"
        )

    def check(self) -> None:
        """Raise `DataError` if there is nothing to learn."""
        if not (self.num_labels > 0).any():
            raise DataError(
                f"none of the {len(self.num_labels):,} training sequences has a label: what precedes "
                f"the first one fills data.sequence_length={self.config.sequence_length}: set it to "
                "more"
            )

    @cached_property
    def num_labels(self) -> np.ndarray:
        """How many labels each training sequence has, source by source, each once."""
        trained = zip(self.parts, self.train.sources, strict=True)
        return np.concatenate([source.labels() for part, source in trained if part.weight])

    @property
    def shares(self) -> list[float]:
        """Each source's share of the training sequences."""
        return [count / len(self.train) for count in self.train.counts]

    def labels_per_byte(self, part: Part) -> float:
        """Learnt tokens of a source's held-out documents for each byte of their text."""
        return part.corpus.held_out.num_learnt / max(part.corpus.held_out.num_bytes, 1)

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Loss per label, and per byte of text, which compares across tokenizers.

        With several sources, per byte for each of them, too.
        """
        loss = sums["nats"] / max(sums["labels"], 1.0)
        if len(self.parts) == 1:
            return {"loss": loss, "nats_per_byte": loss * self.labels_per_byte(self.parts[0])}
        figures, total_bytes = {}, 0.0
        for number, part in enumerate(self.parts):
            nats, labels = sums[f"nats/{number}"], sums[f"labels/{number}"]
            num_bytes = labels / max(self.labels_per_byte(part), 1e-12)
            total_bytes += num_bytes
            if labels:
                figures[f"nats_per_byte/{part.short_name}"] = nats / num_bytes
        return {"loss": loss, "nats_per_byte": sums["nats"] / max(total_bytes, 1.0), **figures}

    def describe(self, tokenizer: str) -> dict[str, str]:
        """Corpus and sequences, for the header."""
        lines = {}
        if len(self.parts) == 1:
            lines["data"] = self._amounts(self.parts[0], tokenizer)
        else:
            lines["data"] = f"{len(self.parts)} sources, {len(self.train):,} sequences an epoch"
            for part, share, count, source in zip(
                self.parts, self.shares, self.train.counts, self.train.sources, strict=True
            ):
                lines[f"  {part.short_name}"] = (
                    f"{share:.1%} of the sequences (weight {part.weight:g}), "
                    f"{count / max(len(source), 1):.2f} passes an epoch; "
                    + self._amounts(part, tokenizer)
                )
        held_out = "" if self.held_out else "; none held out, so no evaluation"
        lines["sequences"] = self._sequence_words() + held_out
        return lines

    @staticmethod
    def _amounts(part: Part, tokenizer: str) -> str:
        corpus = part.corpus
        text = (
            f"{part.words}: {len(corpus.train.starts) - 1:,} documents, "
            f"{len(corpus.train.tokens):,} tokens ({tokenizer}), "
            f"{len(corpus.held_out.tokens):,} held out"
        )
        if corpus.bad_rows:
            more = "; ..." if corpus.bad_rows > len(corpus.first_bad) else ""
            text += f"; {corpus.bad_rows} bad rows skipped ({'; '.join(corpus.first_bad)}{more})"
        return text

    def _sequence_words(self) -> str:
        config, sources = self.config, self.train.sources
        number = f"{config.sequence_length:,} tokens"
        text = {
            "stream": f"{number}, documents packed",
            "whole": f"{number}, whole documents packed, {self.padding():.1%} padding",
            "none": f"up to {number}, a document each",
        }[config.packing]
        longer = sum(source.longer for source in sources)
        if longer:
            done = {"split": "split", "truncate": "truncated", "drop": "dropped"}
            text += f"; {longer:,} longer documents {done[config.long_documents]}"
        unlabelled = int((self.num_labels == 0).sum())
        if unlabelled and any(part.corpus.train.learnt is not None for part in self.parts):
            text += f"; {unlabelled:,} sequences without a label (their loss is 0)"
        return text

    def padding(self) -> float:
        """Share of the training sequences' tokens that are padding, where they have one length."""
        used = sum(int((s.layout.last_P - s.layout.first_P).sum()) for s in self.train.sources)
        room = sum(len(source) for source in self.train.sources) * self.config.sequence_length
        return 1 - used / max(room, 1)
