"""Floating-point operations of training on one target."""

from models.trip.config import APPENDING, TripConfig
from models.trip.heads.din import UNITS


def training_flops(config: TripConfig, groups: int) -> float:
    """Matrix products (6 per weight and item) and attention, forward and backward.

    Items are read twice if some are hidden, of `reconstruction_rows` of the histories. Products with
    the item table are left out: they depend on the catalogue, and are small beside the layers of a
    small one.
    """
    D = config.hidden_size
    N = config.max_history + (config.pooling in APPENDING)
    passes = int(config.reads_tokens) + (config.reconstruction > 0) * config.reconstruction_rows
    total = passes * config.token_layers * _layer(N, D, hstu=config.layer == "hstu")
    summaries = config.summaries * groups
    if summaries:
        total += 6.0 * (summaries + config.summaries) * N * D
        total += config.upper_layers * _layer(summaries + 1, D)
    sizes = {"items": N, "tokens": N, "summaries": summaries}
    return total + 6.0 * _head_weights(config, [sizes[key] for key in config.keys_used])


def _layer(N: int, D: int, hstu: bool = False) -> float:
    return 6.0 * (5 if hstu else 12) * D * D * N + 12.0 * N * N * D


def _head_weights(config: TripConfig, kinds: list[int]) -> float:
    """Weights of the head, each times how often it is used for one target; `kinds`: keys of each."""
    D, keys = config.hidden_size, sum(kinds)
    if config.read != "together":
        findings = len(kinds) + (config.summaries > 0)
        looks = sum(_look(config, of) for of in kinds)
        if config.read == "gated":
            return looks + D * findings + 6 * D * D + 2 * D
        return looks + 2 * (1 + 2 * findings) * D * D + 2 * D
    verdict = 6 * D * D + 2 * D
    if config.pooling in ("target", "mean"):
        return _look(config, keys) + verdict
    if config.pooling == "din":
        first, second = UNITS
        return keys * (4 * D * first + first * second + second) + verdict
    if config.pooling == "flat":
        return 4 * D * D * keys + 8 * D * D + 2 * D
    return 0.0 if config.pooling == "last" else verdict


def _look(config: TripConfig, keys: int) -> float:
    """One target's: keys are not projected (`models.trip.heads.target`)."""
    D, asks = config.hidden_size, config.pooling == "target"
    return D * D + keys * config.num_heads * D + asks * (2 * D * D + keys * config.num_heads * D)
