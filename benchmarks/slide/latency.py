"""Users per second: a list in one greedy pass against beam search, each as one CUDA graph.

Weights are random and the semantic IDs those of a real set: neither changes how long decoding takes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from models.slide.build import Decoder, build, init_weights
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


def latencies(
    data: Data, device: torch.device, tiny: bool = False, there: Sequence[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each size, way to decode, kind of codes, and batch; what takes longest comes last.

    What is `there` already is passed over.
    """
    known = {(row["size"], row["how"], row["codes"], row["batch"]) for row in there}
    sizes = {"tiny": (16, 1, 2)} if tiny else SIZES
    batches = (1, 4) if tiny else BATCHES
    split = data.split
    targets = split.targets("test")
    histories = [split.history(x, int(targets[x]))[-HISTORY:] for x in range(max(batches))]
    for size, shape in sizes.items():
        models = {codes: _model(data, shape, codes, device) for codes in ("steps", "heads")}
        found = [(how, codes, batch) for how in ROWS for codes in models for batch in batches]
        found = [key for key in found if (size, *key) not in known]
        for how, codes, batch in sorted(found, key=lambda key: _cost(*key)):
            model = models[codes]
            asked = [Exported(model, data.ids, [], {}, size)]
            row = parse_row(f"model:{how}", {"model": ""})
            about = {"size": size, "codes": codes, "how": how,
                     "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
            yield {**about, **measure(row, asked, histories, batch, LENGTH, seconds=0.5)}


def _cost(how: str, codes: str, batch: int) -> int:
    """What comes last if time runs out: passes of the layers one after the other, and their rows."""
    passes = LENGTH if how == "greedy" else 1
    return passes * (3 if codes == "steps" else 1) * batch


def _model(data: Data, shape: tuple[int, int, int], codes: str, device: torch.device) -> Decoder:
    hidden, layers, heads = shape
    config = SlideConfig(
        hidden_size=hidden, num_layers=layers, num_heads=heads, codes=codes,
        max_history=HISTORY, list_length=LENGTH,
    )  # fmt: skip
    with torch.device("meta"):
        model = build(config, data.ids.sizes)
    materialize(model, device, init_weights, 0)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    return model.eval()
