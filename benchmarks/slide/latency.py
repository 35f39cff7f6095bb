"""Users per second: a list in one greedy pass against beam search, each as one CUDA graph.

Weights are random and the semantic IDs those of a real set: neither changes how long decoding takes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from models.slide.build import build, init_weights
from models.slide.config import SlideConfig
from models.slide.folder import Exported
from parallel.weights import materialize
from recipes.slide.data import Data
from recipes.slide.latency import measure
from recipes.slide.rows import parse_row

SIZES = {"s": (256, 4, 4), "0.5B": (1280, 24, 20)}
"""Hidden size, layers, heads."""
BATCHES = (1, 64, 512)
ROWS = ("greedy", "beam50", "beam200")
LENGTH, HISTORY = 10, 20


def latencies(data: Data, device: torch.device, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each size, kind of codes, way to decode, and batch; small models first."""
    sizes = {"tiny": (16, 1, 2)} if tiny else SIZES
    split = data.split
    targets = split.targets("test")
    for size, (hidden, layers, heads) in sizes.items():
        for codes in ("steps", "heads"):
            config = SlideConfig(
                hidden_size=hidden, num_layers=layers, num_heads=heads, codes=codes,
                max_history=HISTORY, list_length=LENGTH,
            )  # fmt: skip
            with torch.device("meta"):
                model = build(config, data.ids.sizes)
            materialize(model, device, init_weights, 0)
            if device.type == "cuda":
                model = model.to(torch.bfloat16)
            asked = [Exported(model.eval(), data.ids, [], {}, size)]
            parameters = sum(p.numel() for p in model.parameters())
            batches = (1, 4) if tiny else BATCHES
            histories = [split.history(x, int(targets[x])) for x in range(max(batches))]
            histories = [h[-HISTORY:] for h in histories]
            for how in ROWS:
                row = parse_row(f"model:{how}", {"model": ""})
                for batch in batches:
                    found = measure(row, asked, histories, batch, LENGTH, seconds=0.5)
                    yield {
                        "size": size, "codes": codes, "how": how, "parameters": parameters, **found
                    }  # fmt: skip
