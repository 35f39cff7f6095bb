"""How long decoding takes: from histories on the device to lists on the device."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from models.slide.folder import Exported
from models.slide.graphs import captured
from models.slide.history import pad_left
from recipes.interactions.tables import Ints
from recipes.slide.rows import Row, decoder

WARMUP, ROUNDS, SECONDS = 2, 50, 5.0
"""Runs that do not count, and the most runs and seconds that do."""


def measure(
    row: Row,
    asked: Sequence[Exported],
    histories: Sequence[Ints],
    batch: int,
    length: int,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Median and 95th percentile of a batch in ms, users per second, and passes of the layers.

    `steps` passes follow each other, and have `row_steps` rows a user together. On a GPU `peak_mib` is
    what decoding takes at most, beyond weights and trie.

    On a GPU the whole decoding is one CUDA graph, for every kind of row.
    """
    device = asked[0].trie.device
    repeated = [histories[n % len(histories)] for n in range(batch)]
    longest = max(exported.model.config.max_history for exported in asked)
    items_BH = pad_left(repeated, longest).to(device)
    before = _peak(device, anew=True)
    run = captured(decoder(row, asked, length), items_BH, items_BH[:, :0])
    times: list[float] = []
    while len(times) < WARMUP + ROUNDS and sum(times[WARMUP:]) < seconds:
        _wait(device)
        begin = time.perf_counter()
        run(items_BH, items_BH[:, :0])
        _wait(device)
        times.append(time.perf_counter() - begin)
    taken = np.array(times[WARMUP:] or times)
    memory = {"peak_mib": (_peak(device) - before) / 2**20} if device.type == "cuda" else {}
    steps = rows = 0
    for exported in asked:
        one_pass = exported.model.config.codes == "heads"
        passes = 1 if one_pass else exported.ids.levels  # of the layers, for an item
        if row.how == "beam":
            steps += passes
            rows += 1 + max(row.beams, length) * (passes - 1)
        else:
            steps += length * passes
            rows += length * passes
    return {
        "batch": batch,
        "ms": float(np.median(taken) * 1e3),
        "ms_95": float(np.quantile(taken, 0.95) * 1e3),
        "users_per_second": float(batch / np.median(taken)),
        "steps": steps,
        "row_steps": rows,
        "runs": len(taken),
        **memory,
    }


def _peak(device: torch.device, anew: bool = False) -> int:
    """Bytes of tensors at most, since it was asked `anew`; 0 where nobody counts them."""
    if device.type != "cuda":
        return 0
    if anew:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
