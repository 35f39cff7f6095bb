"""Any encoder of transformers with a classifier on it, built on the meta device."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from configs.values import at_least, one_of

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Our names for the sizes, and transformers' names for the same."""


POOLINGS = ("first", "mean")


@dataclass(kw_only=True)
class EncoderConfig:
    """The `model` node of task `lelora_classify`. Empty fields are left to the folder or the type."""

    type: str = "bert"
    """transformers model type when `path` is not given: bert, roberta, distilbert, electra ..."""
    path: str | None = None
    """Local folder (or hub name, where there is a network) whose config.json describes the model."""
    load_weights: bool = False
    """Start from the safetensors in `path`; the classifier is new unless they have one that fits."""
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding; empty: what the tokenizer needs."""
    max_positions: int | None = None
    dropout: float | None = None
    """Share that training leaves out, everywhere; empty: as the model has it."""
    pooling: str = "first"
    """What the classifier sees: first (the first token, through the model's own layers, as transformers
    has it) or mean (of all tokens, for encoders of sentences that were trained that way)."""
    config: dict[str, Any] = field(default_factory=dict)
    """Any other field of the transformers configuration: +model.config.initializer_range=0.01."""

    def __post_init__(self) -> None:
        for name in SIZES:
            if (value := getattr(self, name)) is not None:
                at_least(f"model.{name}", value, 1)
        one_of("model.pooling", self.pooling, POOLINGS)
        if self.load_weights and self.path is None:
            raise ValueError("model.load_weights=true needs a folder: set model.path")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout}: set model.dropout below 1")


DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "attention_dropout", "seq_classif_dropout", "mlp_dropout", "embedding_dropout",
)  # fmt: skip


def encoder_config(config: EncoderConfig, vocab_size: int, labels: list[str]) -> Any:
    """The transformers configuration; `vocab_size` is the tokenizer's. Raises `ValueError`."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    fields: dict[str, Any] = {
        theirs: getattr(config, ours)
        for ours, theirs in SIZES.items()
        if getattr(config, ours) is not None
    }
    fields |= {"num_labels": len(labels), "problem_type": "single_label_classification"}
    fields |= config.config
    try:
        if config.path is None:
            one_of("model.type", config.type, KNOWN)
            fields = {"vocab_size": vocab_size, "pad_token_id": 0, **fields}
            found = AutoConfig.for_model(config.type, **fields)
        else:
            found = AutoConfig.from_pretrained(config.path, **fields)
    except OSError as error:
        raise ValueError(
            f"model.path={config.path} is neither a folder with a config.json nor a model that can be "
            "reached from here: set model.path to a local folder"
        ) from error
    except TypeError as error:
        raise ValueError(f"{error}: set the fields under model.* and model.config.*") from error
    if config.dropout is not None:
        for name in DROPOUTS:
            if hasattr(found, name):
                setattr(found, name, config.dropout)
    found.id2label = dict(enumerate(labels))
    found.label2id = {label: number for number, label in enumerate(labels)}
    if found.vocab_size < vocab_size:
        raise ValueError(
            f"model.vocab_size={found.vocab_size} is smaller than the tokenizer's {vocab_size} ids: set "
            f"model.vocab_size={vocab_size} or more"
        )
    return found


class MeanPooler(nn.Module):
    """In place of an encoder's pooler: the mean over the tokens that its attention mask shows."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.mask_BS: torch.Tensor | None = None
        body.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        del inputs
        self.mask_BS = named["attention_mask"]

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """(B, D)."""
        assert self.mask_BS is not None
        mask_BS1 = self.mask_BS[..., None].to(hidden_BSD.dtype)
        return (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1)


def build_encoder(hf_config: Any, pooling: str = "first") -> nn.Module:
    """The model on the meta device, in fp32 and in training mode. Raises `ValueError`."""
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForSequenceClassification.from_config(
                hf_config, dtype=torch.float32
            )
    except Exception as error:  # whatever an architecture raises, its sizes are the cause
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"model.type={hf_config.model_type} cannot be built ({reason}): set the sizes under model.*"
        ) from error
    if pooling == "mean":
        body = getattr(model, str(model.base_model_prefix))
        if getattr(body, "pooler", None) is None:
            raise ValueError(
                f"model.pooling=mean needs a pooler to put the mean in place of, and "
                f"{hf_config.model_type} has none: set model.pooling=first"
            )
        body.pooler = MeanPooler(body)
    return model.train()


def head_names(model: nn.Module) -> list[str]:
    """Modules that an encoder without a classifier does not have: direct children beside its body."""
    body = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, child in model.named_children()
        if name != body and next(child.parameters(), None) is not None
    ]
