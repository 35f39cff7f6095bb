"""Floating-point operations of training on one target."""

from models.trip.config import TripConfig


def training_flops(config: TripConfig, groups: int) -> float:
    """Matrix products (6 per weight and item) and attention, forward and backward.

    Items are read twice if some are hidden. Products with the item table are left out: they depend
    on the catalogue, and are small beside the layers of a small one.
    """
    D, N = config.hidden_size, config.max_history
    passes = 2 if config.reconstruction else 1
    total = passes * config.token_layers * _layer(N, D)
    keys = N + 1
    if config.summaries:
        keys += config.summaries * groups
        total += config.upper_layers * _layer(config.summaries * groups + 1, D)
    return total + 6.0 * (2 * D * D * keys + 7 * D * D + 2 * D)


def _layer(N: int, D: int) -> float:
    return 6.0 * 12 * D * D * N + 12.0 * N * N * D
