"""Floating-point operations of training on one sequence."""

from collections.abc import Sequence

from models.slide.config import SlideConfig


def training_flops(config: SlideConfig, sizes: Sequence[int], tokens: int) -> float:
    """Matrix products (6 per weight and token) and causal attention, forward and backward."""
    D, T = config.hidden_size, tokens
    layers = config.num_layers * (6.0 * 12 * D * D * T + 6.0 * T * T * D)
    return layers + 6.0 * D * sum(sizes) * T / len(sizes)
