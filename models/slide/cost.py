"""Floating-point operations of training on one sequence."""

from collections.abc import Sequence

from models.slide.config import SlideConfig


def training_flops(config: SlideConfig, sizes: Sequence[int], tokens: int) -> float:
    """Matrix products (6 per weight and token) and causal attention, forward and backward."""
    D, L = config.hidden_size, len(sizes)
    heads = 0.0
    if config.codes == "heads":
        heads = 6.0 * 2 * D * D * tokens
        tokens //= L
    layers = config.num_layers * (6.0 * 12 * D * D * tokens + 6.0 * tokens * tokens * D)
    outlets = 6.0 * D * sum(sizes) * tokens / (1 if config.codes == "heads" else L)
    return layers + heads + outlets
