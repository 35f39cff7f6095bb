"""Numbers for items, without a language model: words and attributes, and who is met together.

I items, V words, D numbers of an item
"""

import re
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from recipes.interactions.tables import Ints
from recipes.slide.items import Items
from recipes.slide.split import Split
from recipes.task import DataError

WORD = re.compile(r"\w+")
EXTRA, ROUNDS = 8, 4
"""Of the randomized SVD: dimensions beyond those wanted, and power iterations."""


def item_features(
    items: Items, split: Split, size: int, cooccurrence: float, empty_text: bool, seed: int
) -> Tensor:
    """(I, D) in double precision: what is known of each item, then who it is met with in training.

    Each part is scaled so that its rows have a mean square of 1, the second one times `cooccurrence`
    squared. Raises `DataError` for an item without text (unless `empty_text`), and if nothing is known.
    """
    parts = []
    if items.vectors_ID is not None:
        parts.append(_scaled(torch.from_numpy(items.vectors_ID).double()))
    elif items.texts is not None or items.attributes is not None:
        if not empty_text:
            _check_texts(items)
        parts.append(_scaled(text_features(items, size, seed)))
    if cooccurrence:
        parts.append(cooccurrence * _scaled(cooccurrence_features(split, size, seed)))
    if not parts:
        raise DataError(
            "nothing is known of the items: set data.items to tables with text, attributes or vectors, "
            "or task.cooccurrence above 0"
        )
    return torch.cat(parts, dim=1)


def _check_texts(items: Items) -> None:
    texts = items.texts or [""] * len(items.names)
    attributes = items.attributes or [[]] * len(items.names)
    for name, text, words in zip(items.names, texts, attributes, strict=True):
        if not WORD.search(text) and not words:
            raise DataError(
                f"item {name} has no text: give it one, set data.text_keys to other columns, or "
                "task.empty_text=true to go on without"
            )


def text_features(items: Items, size: int, seed: int) -> Tensor:
    """TF-IDF of words and attributes, rows of length 1, by their first singular vectors: (I, size)."""
    bags = [Counter(words) for words in _words(items)]
    known = Counter(word for bag in bags for word in bag)
    number_of = {word: number for number, word in enumerate(sorted(known))}
    rows = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
    columns = np.array([number_of[word] for bag in bags for word in bag], dtype=np.int64)
    counts = np.array([n for bag in bags for n in bag.values()], dtype=np.float64)
    shown = np.array([known[word] for bag in bags for word in bag], dtype=np.float64)
    values = counts * np.log(1 + len(bags) / np.maximum(shown, 1))
    lengths = np.sqrt(np.bincount(rows, weights=values**2, minlength=len(bags)))
    values /= lengths[rows]
    left_ID, strength_D = svd(rows, columns, values, (len(bags), len(number_of)), size, seed)
    return left_ID * strength_D


def _words(items: Items) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in items.names]
    for bag, text in zip(found, items.texts or (), strict=False):
        bag += WORD.findall(text.lower())
    for bag, attributes in zip(found, items.attributes or (), strict=False):
        bag += [f"attribute {name.lower()}" for name in attributes]
    return found


def cooccurrence_features(split: Split, size: int, seed: int, window: int = 3) -> Tensor:
    """Positive pointwise mutual information of items met at most `window` apart, by SVD: (I, size)."""
    first, second, _, _ = training_pairs(split, window)
    first, second = np.concatenate([first, second]), np.concatenate([second, first])
    count_items = split.sequences.num_items
    pairs, counts = np.unique(first * count_items + second, return_counts=True)
    rows, columns = pairs // count_items, pairs % count_items
    of_item = np.bincount(rows, weights=counts, minlength=count_items)
    pmi = np.log(counts * counts.sum() / (of_item[rows] * of_item[columns]))
    kept = pmi > 0
    shape = (count_items, count_items)
    left_ID, strength_D = svd(rows[kept], columns[kept], pmi[kept], shape, size, seed)
    return left_ID * strength_D.sqrt()


def training_pairs(split: Split, window: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Earlier and later item of each pair of a user's training interactions at most `window` apart.

    And how far apart they are, and whose they are.
    """
    items_E = split.sequences.items_E
    users_E = np.repeat(np.arange(split.sequences.num_users), np.diff(split.sequences.starts_X))
    parts = [(items_E[:0],) * 4]
    for apart in range(1, window + 1):
        same = (users_E[apart:] == users_E[:-apart]) & split.in_training[apart:]
        earlier, later = items_E[:-apart][same], items_E[apart:][same]
        parts.append((earlier, later, np.full_like(later, apart), users_E[apart:][same]))
    earlier, later, distance, users = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    return earlier, later, distance, users


def svd(
    rows: Ints, columns: Ints, values: np.ndarray, shape: tuple[int, int], size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """First left singular vectors (I, D) and singular values (D) of a sparse matrix, D <= size.

    By a random subspace and power iterations (Halko et al. 2011).
    """
    size = min(size, *shape)
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([rows, columns])),
        torch.from_numpy(values),
        shape,
        check_invariants=True,
    ).coalesce()
    generator = torch.Generator().manual_seed(seed)
    width = min(size + EXTRA, *shape)
    basis = torch.randn(shape[1], width, generator=generator, dtype=torch.float64)
    for _ in range(ROUNDS):
        left, _ = torch.linalg.qr(torch.sparse.mm(matrix, basis))
        basis, _ = torch.linalg.qr(torch.sparse.mm(matrix.t(), left))
    left, strength, _ = torch.linalg.svd(torch.sparse.mm(matrix, basis), full_matrices=False)
    return left[:, :size], strength[:size]


def _scaled(x_ID: Tensor) -> Tensor:
    mean_square = x_ID.square().sum(1).mean()
    return x_ID / mean_square.sqrt() if mean_square > 0 else x_ID
