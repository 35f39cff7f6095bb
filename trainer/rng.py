"""Random states as plain tensors, so that a checkpoint needs no pickle to bring them back."""

import random

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The states of Python's, NumPy's, torch's and the device's generators."""
    version, words, gauss = random.getstate()
    assert version == 3
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937"
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [float("nan") if gauss is None else gauss], dtype=torch.float64
        ),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    gauss = state["python_gauss"].item()
    words = tuple(state["python"].tolist())
    random.setstate((3, words, None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    legacy = ("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, cached)
    np.random.set_state(legacy)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
