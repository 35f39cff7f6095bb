"""What the model sees of a text corpus, in words: for `python -m trainer.inspect_data`."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from recipes.text.data import TextData
from recipes.text.packing import IGNORED, Sequence_S
from recipes.text.tokenizers import Tokenizer

BARS = 10
"""Rows of the histogram of lengths."""


def show(sample: Sequence_S, tokenizer: Tokenizer, sources: Sequence[str]) -> Iterator[str]:
    """A sequence: its pieces as text, what is learnt apart from what is given, then every token."""
    source = f"source {sources[sample.source]}, " if len(sources) > 1 else ""
    labels = int((sample.labels_S != IGNORED).sum())
    size = len(sample.tokens_S)
    yield f"{source}{size:,} tokens, {labels:,} labels, {sample.padding:,} padding"
    bounds = [*sample.pieces, size]
    for number, (begin, end) in enumerate(pairwise(bounds), start=1):
        if begin >= size - sample.padding:
            yield f"  padding: tokens {begin}-{end - 1}"
            continue
        yield (
            f"  piece {number}: tokens {begin}-{end - 1}, positions "
            f"{sample.positions_S[begin]}-{sample.positions_S[end - 1]}"
        )
        yield from _texts(sample, begin, end, tokenizer)
    yield from _tokens(sample, tokenizer)


def _texts(sample: Sequence_S, begin: int, end: int, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each run of tokens that are labels of the one before, or are not."""
    learnt = [at > begin and sample.labels_S[at - 1] != IGNORED for at in range(begin, end)]
    at = begin
    for is_learnt, run in groupby(learnt):
        length = len(list(run))
        text = tokenizer.decode(sample.tokens_S[at : at + length].tolist())
        yield f"    {'learnt' if is_learnt else 'given ':6} {text!r}"
        at += length


def _tokens(sample: Sequence_S, tokenizer: Tokenizer) -> Iterator[str]:
    yield f"  {'token':>8} {'position':>8} {'id':>7} {'label':>7}  text"
    for at in range(len(sample.tokens_S) - sample.padding):
        token, label = int(sample.tokens_S[at]), int(sample.labels_S[at])
        shown = "-" if label == IGNORED else str(label)
        text = tokenizer.decode([token])
        yield f"  {at:8} {sample.positions_S[at]:8} {token:7} {shown:>7}  {text!r}"


def survey(data: TextData) -> dict[str, str]:
    """The whole of the training data: amounts, labels, padding, lengths, and rows left out."""
    parts = [part for part in data.parts if part.weight]
    sequences = [s for p, s in zip(data.parts, data.train.sources, strict=True) if p.weight]
    sizes = np.concatenate([np.diff(part.corpus.train.starts) for part in parts])
    used = sum(int((s.layout.last_P - s.layout.first_P).sum()) for s in sequences)
    labels, unlabelled = int(data.num_labels.sum()), int((data.num_labels == 0).sum())
    padding = f"{data.padding():.2%} of the tokens"
    if data.config.packing == "none":
        padding = "each micro-batch to its longest sequence; all to the longest allowed: " + padding
    held_out = sum(len(part.corpus.held_out.starts) - 1 for part in data.parts)
    return {
        "documents": f"{len(sizes):,}; {held_out:,} held out",
        "tokens": f"{sizes.sum():,}, of which {used:,} are in sequences",
        "labels": f"{labels:,}, {labels / max(used, 1):.1%} of the tokens; "
        f"{unlabelled:,} sequences have none",
        "padding": padding,
        "bad rows": _bad_rows(data),
        "document lengths": "\n".join(histogram(sizes, data.config.sequence_length)),
    }


def _bad_rows(data: TextData) -> str:
    total = sum(part.corpus.bad_rows for part in data.parts)
    first = [words for part in data.parts for words in part.corpus.first_bad]
    return f"{total:,} skipped" + (f": {'; '.join(first)}" if first else "")


def histogram(sizes: np.ndarray, length: int) -> list[str]:
    """How many documents have how many tokens, in powers of two; a mark where a sequence ends."""
    upper = [2**power for power in range(64) if 2**power < 2 * sizes.max(initial=1)]
    bins = np.searchsorted(upper, sizes)
    counts = np.bincount(bins, minlength=len(upper))
    lines: list[str] = []
    for power, count in enumerate(counts.tolist()):
        if count or lines:
            low = upper[power - 1] + 1 if power else 1
            bar = "#" * round(40 * count / counts.max())
            mark = f"  <- data.sequence_length={length}" if low <= length <= upper[power] else ""
            lines.append(f"{low:>9,} to {upper[power]:>9,}  {count:>9,} {bar}{mark}")
    return lines
