"""What the members of a fleet learn from, as whole tensors; equal to what the recipe's tasks collate.

R rows, H items of a history, K of a list, N of a sequence, I items, L levels
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.slide.fleet import MakeBatch
from models.slide.history import NOTHING, pad_left
from recipes.interactions.tables import Ints
from recipes.slide.gr_train import GrTrainTask, sequences
from recipes.slide.list_distill import Followed, ListDistillTask, place_weights
from recipes.slide.shards import Rows

Made = tuple[dict[str, Tensor], Tensor]
"""Columns, and the items of each row's sequence."""


def of_windows(task: GrTrainTask, device: torch.device) -> Made:
    """What a teacher reads."""
    samples = task.train_samples()
    items = [samples[n] for n in range(len(samples))]
    lengths_R = torch.tensor([len(w.items_N) for w in items])
    R, N = len(items), int(lengths_R.max())
    items_RN, weights_RN = np.zeros((R, N), np.int32), np.zeros((R, N), np.float32)
    for row, window in enumerate(items):
        items_RN[row, : len(window.items_N)] = window.items_N
        weights_RN[row, : len(window.items_N)] = window.learnt_N
    return _on(device, items=items_RN, weights=weights_RN), lengths_R


def of_lists(task: ListDistillTask, rows: Rows, device: torch.device) -> Made:
    """What a student reads: rows of teachers' lists, whose order and weights the task decides."""
    config, K = task.config, task.model_config.list_length
    assert config.target == "none"
    assert not config.only_found
    items_RK = rows.items_RK[:, :K]
    if config.order == "reverse":
        items_RK = items_RK[:, ::-1]
    elif config.order == "random":
        shuffle = np.random.default_rng(0).random(items_RK.shape).argsort(1)
        items_RK = np.take_along_axis(items_RK, shuffle, 1)
    if config.weights == "score":
        weights_RK = np.stack([place_weights(row[:K], config) for row in rows.scores_RK])
    else:
        weights_RK = np.broadcast_to(place_weights(rows.scores_RK[0, :K], config), items_RK.shape)
    assert (items_RK != NOTHING).all()
    return _joined(rows.histories, items_RK, weights_RK, task.model_config.max_history, device)


def of_followed(task: ListDistillTask, device: torch.device) -> Made:
    """What a directly trained list model reads: the items that really followed."""
    samples = task.train_samples()
    assert isinstance(samples, Followed)
    rows = [samples[n] for n in range(len(samples))]
    items_RK = np.full((len(rows), task.model_config.list_length), NOTHING, dtype=np.int64)
    for row, sample in zip(items_RK, rows, strict=True):
        row[: len(sample.list_K)] = sample.list_K
    weights_RK = (items_RK != NOTHING).astype(np.float32)
    histories = [sample.history for sample in rows]
    return _joined(histories, items_RK, weights_RK, task.model_config.max_history, device)


def of_groups(task: ListDistillTask, rows: Rows, device: torch.device) -> Made:
    """What list-level reinforcement learning reads."""
    H, K = task.model_config.max_history, task.model_config.list_length
    columns = _on(
        device, histories_BH=pad_left(rows.histories, H).numpy(), targets_B=rows.targets_R,
        teachers_BM=rows.items_RK, scores_BM=rows.scores_RK,
    )  # fmt: skip
    return columns, torch.full((len(rows.targets_R),), H + K)


def joined(first: Rows, second: Rows) -> Rows:
    """One behind the other."""

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(first, name), getattr(second, name)])

    return Rows(
        both("users_R"), both("events_R"), both("copies_R"), [*first.histories, *second.histories],
        both("targets_R"), both("items_RK"), both("scores_RK"),
    )  # fmt: skip


def of_rows(rows: Rows, chosen_R: NDArray[np.bool_]) -> Rows:
    """Those that are chosen."""
    kept = np.flatnonzero(chosen_R)
    return Rows(
        rows.users_R[kept], rows.events_R[kept], rows.copies_R[kept],
        [rows.histories[row] for row in kept.tolist()], rows.targets_R[kept], rows.items_RK[kept],
        rows.scores_RK[kept],
    )  # fmt: skip


def _joined(
    histories: list[Ints] | object, lists_RK: Ints, weights_RK: Ints | object, H: int,
    device: torch.device,
) -> Made:  # fmt: skip
    """Histories with lists behind them, nothing between: (R, H + K)."""
    padded_RH = pad_left(histories, H).numpy()  # type: ignore[arg-type]
    missing_R = (padded_RH == NOTHING).sum(1)
    both_RN = np.concatenate([padded_RH, lists_RK], axis=1)
    zeros_RH = np.zeros(padded_RH.shape, np.float32)
    weights_RN = np.concatenate([zeros_RH, np.asarray(weights_RK, np.float32)], axis=1)
    N = both_RN.shape[1]
    from_RN = (np.arange(N) + missing_R[:, None]) % N
    items_RN = np.take_along_axis(both_RN, from_RN, 1).clip(min=0).astype(np.int32)
    weights_RN = np.take_along_axis(weights_RN, from_RN, 1)
    lists_R = H - missing_R
    columns = _on(device, items=items_RN, weights=weights_RN, lists=lists_R)
    return columns, torch.from_numpy(lists_R + lists_RK.shape[1])


def _on(device: torch.device, **arrays: np.ndarray) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(x)).to(device) for name, x in arrays.items()
    }


def batches_of(task: GrTrainTask, device: torch.device) -> MakeBatch:
    """Sequences of codes, of windows or of histories and lists."""
    codes_IL = torch.from_numpy(task.data.ids.codes_IL).to(device)
    sizes, levels = task.data.ids.sizes, task.data.ids.levels

    def make(columns: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        items_BN = columns["items"][:, :length].long()
        weights_BN = columns["weights"][:, :length]
        batch = sequences(codes_IL, sizes, items_BN, weights_BN, columns.get("lists"))
        return {**batch, "count": weights_BN.sum() * levels}

    return make


def groups_of(task: ListDistillTask, device: torch.device) -> MakeBatch:
    """Histories, whose lists are drawn while training."""

    def make(columns: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        del length
        count = float(len(columns["targets_B"]) * task.config.group)
        return {**columns, "count": torch.full((), count, device=device)}

    return make
