"""Which decoder a configuration means, and its first weights."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from models.slide.config import SlideConfig
from models.slide.heads import SlideHeads
from models.slide.model import STD, Slide

Decoder: TypeAlias = Slide | SlideHeads


def build(config: SlideConfig, sizes: Sequence[int]) -> Decoder:
    """A decoder of semantic IDs with levels of these sizes."""
    return SlideHeads(config, sizes) if config.codes == "heads" else Slide(config, sizes)


def init_weights(module: nn.Module) -> None:
    """Initialise the direct parameters of one module of the model.

    Slots start at zero: a list model that begins with a teacher's weights begins as the teacher.
    """
    if isinstance(module, Slide | SlideHeads):
        for name, table in module.named_parameters(recurse=False):
            if name == "slots_KD":
                nn.init.zeros_(table)
            else:
                nn.init.normal_(table, std=STD)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=STD)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
