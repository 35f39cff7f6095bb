"""Supervised fine-tuning of a causal language model through adapters: task `lelora_sft`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from models.causal_lm import CausalLMConfig
from models.hf_folder import Read
from models.stored_weights import Stored
from recipes.abilities import Steering, Training
from recipes.lelora.adapted import Adapted
from recipes.lelora.config import LeloraConfig
from recipes.lelora.exporting import export_adapter, export_arguments, merged, writes_adapter
from recipes.sft import ChatConfig, SFTTask
from recipes.task import Batch, Samples


@dataclass(kw_only=True)
class LeloraSFTConfig:
    """The `task` node."""

    name: str = "lelora_sft"


class LeloraSFTTask(SFTTask):
    """As `recipes.sft`, but what trains are adapters."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": LeloraSFTConfig,
        "model": CausalLMConfig,
        "data": ChatConfig,
        "lelora": LeloraConfig,
    }

    def __init__(
        self, *, task: Any, model: CausalLMConfig, data: ChatConfig, seed: int, lelora: LeloraConfig
    ) -> None:
        super().__init__(task=task, model=model, data=data, seed=seed)
        self.adapted = Adapted(lelora, seed, "CAUSAL_LM")

    def build_model(self) -> nn.Module:
        """The transformers model on the meta device, with adapters."""
        return self.adapted.adapt(super().build_model())

    def init_weights(self, module: nn.Module) -> None:
        """The architecture's, and the adapters'."""
        self.adapted.init(module, super().init_weights)

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        """By transformers' own rules; adapters are not in the folder."""
        base = super().build_model() if self.adapted.is_peft else model
        return self.adapted.locate(model, super().locate_weights(base, stored))

    def train_samples(self) -> Samples:  # type: ignore[override]
        """As for sft, without those that judge decisions."""
        return self.adapted.split(super().train_samples())

    def steering(self, training: Training) -> Steering | None:
        """See `recipes.abilities.Steers`."""
        return self.adapted.steer(self, training)

    def panels(self) -> list[dict[str, Any]]:
        """What was decided."""
        return self.adapted.panels()

    def figures(self, step: int, steps: int, seconds: Sequence[float]) -> dict[str, Any]:
        """See `recipes.abilities.HasFigures`."""
        del seconds
        return self.adapted.figures(step, steps)

    def flops(self, batch: Batch) -> float:
        """Without the gradients of what is frozen."""
        share = self.adapted.flops_share(self._flops_per_token / 6)
        tokens = batch["tokens_BS"].numel() - batch["padding"]
        return share * self._flops_per_token * tokens + self._flops_per_pair * float(batch["pairs"])

    def describe(self) -> dict[str, str]:
        """As for sft, with the method."""
        return {**super().describe(), **self.adapted.describe()}

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """Adapter or merged weights, and what these have."""
        export_arguments(parser)

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """A LoRA folder of peft, or (`--merge`) a folder of whole weights."""
        if writes_adapter(self.adapted, options):
            base = self.model_config.path if self.model_config.load_weights else None
            return export_adapter(self.adapted, model, read, out, options, base)
        if self.adapted.config.method != "full":
            base_model = super().build_model()
            read = merged(
                self.adapted,
                self,
                base_model,
                read,
                lambda stored: SFTTask.locate_weights(self, base_model, stored),
            )
            model = super().build_model()
        return super().export(model, read, out, options)

    def __getstate__(self) -> dict[str, Any]:
        """What data workers need: no adapters."""
        kept = super().__getstate__()
        return {name: value for name, value in kept.items() if name != "adapted"}
