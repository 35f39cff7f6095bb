"""Decoding as one CUDA graph: all steps of a batch of fixed shape, launched at once."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from models.slide.decode import Lists

Decode = Callable[[Tensor, Tensor], Lists]
"""From histories (B, H) and excluded items (B, U) to lists."""
Result = TypeVar("Result")
WARMUP = 3


def captured(decoder: Decode, items_BH: Tensor, exclude_BU: Tensor) -> Decode:
    """The same decoder for inputs of exactly these shapes, on a GPU; elsewhere `decoder` itself.

    The lists that it returns are overwritten by its next call.
    """
    if items_BH.device.type != "cuda":
        return decoder
    static_BH, static_BU = items_BH.clone(), exclude_BU.clone()
    run = recorded(lambda: decoder(static_BH, static_BU))

    def replay(items_BH: Tensor, exclude_BU: Tensor) -> Lists:
        static_BH.copy_(items_BH)
        static_BU.copy_(exclude_BU)
        return run()

    return replay


def recorded(run: Callable[[], Result]) -> Callable[[], Result]:
    """`run` as a CUDA graph, which reads and writes the same memory each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is allocated and tuned at first must not be in the graph
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Result:
        graph.replay()
        return result

    return replay
