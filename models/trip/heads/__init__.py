"""What the target makes of a history, and the log-odds of a click: one file for each way to look.

Every head is called with keys (B, K, D), which of them are there (B, K) and the target (B, D), and
gives log-odds (B,) with the weights of the keys (B, K); `ApartHead` gets each kind of key by itself.
"""

from torch import nn

from models.trip.config import TripConfig
from models.trip.heads.apart import ApartHead
from models.trip.heads.din import DinHead
from models.trip.heads.states import AppendedHead, FlatHead, LastHead
from models.trip.heads.target import TargetHead
from models.trip.heads.tin import TinHead

HEADS: dict[str, type[nn.Module]] = {
    "target": TargetHead,
    "mean": TargetHead,
    "din": DinHead,
    "tin": TinHead,
    "last": LastHead,
    "appended": AppendedHead,
    "flat": FlatHead,
}


def make_head(config: TripConfig) -> nn.Module:
    """The one that `model.pooling` and `model.read` name."""
    if config.read != "together":
        return ApartHead(config)
    return HEADS[config.pooling](config)
