"""Any causal language model of transformers, built on the meta device.

A model is described by a few sizes (`model.num_layers=4`), or by a folder with a `config.json`
(`model.path`), or by both: sizes given on the command line win over the folder's. Any other field
of the transformers configuration goes into `model.config`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from torch import Tensor, nn

from configs.values import at_least, one_of
from models import attention, experts
from models.architectures import attention_kind
from models.precision import at_least_fp32

ATTENTION = ("auto", "packed", "sdpa", "eager")


@dataclass(kw_only=True)
class CausalLMConfig:
    """The `model` node. Empty fields are left to the folder or to transformers' defaults."""

    type: str = "llama"
    """transformers model type when `path` is not given: llama, qwen3, mistral, gemma3_text ..."""
    path: str | None = None
    """Local folder (or hub name, where there is a network) whose config.json describes the model."""
    load_weights: bool = False
    """Start from the safetensors in `path` instead of from random weights."""
    trust_remote_code: bool = False
    """Allow Python code that comes with `path` to run. Off unless you have read that code."""
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding; empty: what the tokenizer needs."""
    max_positions: int | None = None
    rope_theta: float | None = None
    tie_embeddings: bool | None = None
    attention: str = "auto"
    """packed: flash attention over document boundaries; sdpa, eager: transformers' own; auto: packed
    where the architecture can, else the better of transformers' own."""
    config: dict[str, Any] = field(default_factory=dict)
    """Any other field of the transformers configuration: +model.config.initializer_range=0.01."""

    def __post_init__(self) -> None:
        one_of("model.attention", self.attention, ATTENTION)
        for name in SIZES:
            value = getattr(self, name)
            if value is not None:
                at_least(f"model.{name}", value, 1)
        if self.load_weights and self.path is None:
            raise ValueError("model.load_weights=true needs a folder: set model.path")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(
                f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}: "
                "set model.num_kv_heads to a divisor"
            )


SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Our names for the sizes, and transformers' names for the same."""


def transformers_config(config: CausalLMConfig, vocab_size: int) -> Any:
    """The transformers configuration that `config` describes; `vocab_size` is the tokenizer's.

    Raises `ValueError` for an unknown model type, a folder without a config.json, or a field that
    transformers does not take.
    """
    try:
        return _transformers_config(config, vocab_size)
    except (StrictDataclassError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{reason}: set the fields under model.* and model.config.*") from error


def _transformers_config(config: CausalLMConfig, vocab_size: int) -> Any:
    from transformers import AutoConfig

    fields: dict[str, Any] = {
        theirs: getattr(config, ours)
        for ours, theirs in SIZES.items()
        if getattr(config, ours) is not None
    }
    if config.tie_embeddings is not None:
        fields["tie_word_embeddings"] = config.tie_embeddings
    if config.rope_theta is not None:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields |= config.config
    if config.path is not None:
        if Path(config.path).is_dir() and not (Path(config.path) / "config.json").is_file():
            raise ValueError(f"model.path={config.path} holds no config.json: set model.path")
        try:
            return AutoConfig.from_pretrained(
                config.path, trust_remote_code=config.trust_remote_code, **fields
            )
        except OSError as error:
            raise ValueError(
                f"model.path={config.path} is neither a folder nor a model that can be reached "
                f"from here ({str(error).splitlines()[0]}): set model.path to a local folder"
            ) from error
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    one_of("model.type", config.type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    default = AutoConfig.for_model(config.type)
    known = default.to_dict()
    for name in config.config:
        if name not in known and not hasattr(default, name):  # some fields have two names
            one_of("a field of model.config", name, known)
    fields = {"vocab_size": vocab_size, **fields}
    pad = known.get("pad_token_id")
    if pad is not None and pad >= fields["vocab_size"]:  # packed sequences have no padding
        fields.setdefault("pad_token_id", None)
    return AutoConfig.for_model(config.type, **fields)


def local_folder(path: str) -> Path:
    """`path` if it is a folder, else the local copy of the hub's model of that name.

    Raises `ValueError` if it is neither, or the hub cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"model.path={path} is neither a folder nor a model that can be reached from here: "
            "set model.path to a local folder"
        ) from error


def build_causal_lm(
    config: CausalLMConfig, hf_config: Any, packed: bool = True, shared: bool = False
) -> nn.Module:
    """The model on the meta device, in fp32 and in training mode; see `attention_kind`.

    Raises `ValueError` for sizes that the architecture cannot have.
    """
    from transformers import AutoModelForCausalLM

    kind = attention_kind(config.attention, hf_config, packed, shared)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=torch.float32,
                attn_implementation=attention.NAME if kind == "packed" else kind,
                experts_implementation=experts.NAME,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # whatever an architecture raises, its sizes are the cause
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"model.type={hf_config.model_type} cannot be built ({reason}): set the sizes under "
            "model.* and the fields under model.config.*"
        ) from error
    model.config.use_cache = False
    return model.train()


def check_fits(hf_config: Any, sequence_length: int) -> None:
    """Raise `ValueError` if heads do not divide, or sequences are longer than positions exist."""
    text = hf_config.get_text_config()
    for layer in _layers(text):
        heads = getattr(layer, "num_attention_heads", None)
        kv_heads = getattr(layer, "num_key_value_heads", None)
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(
                f"{kv_heads} key/value heads do not divide {heads} heads: set model.num_kv_heads to a "
                f"divisor of {heads}"
            )
    positions = getattr(text, "max_position_embeddings", None)
    if positions and sequence_length > positions:
        raise ValueError(
            f"data.sequence_length={sequence_length} is longer than the {positions} positions of the "
            f"model: set model.max_positions={sequence_length} or more"
        )


def init_weights(model: nn.Module, module: nn.Module) -> None:
    """Initialise the direct parameters of one `module` of `model` by the architecture's own rule."""
    owner = model
    for child in model.modules():  # the innermost sub-model that has rules of its own
        if hasattr(child, "_init_weights") and any(m is module for m in child.modules()):
            owner = child
    owner._init_weights(module)  # type: ignore[operator]


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that take part in a matrix product for every token.

    The input embedding is a look-up and does not count; tied, it counts once, as the output layer.
    Mixture-of-experts layers count the experts that a token visits.
    """
    config: Any = model.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    visited = getattr(config, "num_experts_per_tok", None)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    tied = output is not None and output.weight is embedding
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and not tied:
            continue
        share = visited / experts if experts and visited and ".experts." in name else 1.0
        total += parameter.numel() * share
    return int(total)


def attention_width(model: nn.Module) -> int:
    """Layers x query heads x head dimension: what a query-key pair costs, in multiply-adds, once."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    width = 0
    for layer in _layers(config):
        heads = layer.num_attention_heads
        width += heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    return width


def _layers(text: Any) -> list[Any]:
    """The configuration of each layer: newer architectures have layers with other heads than most."""
    own = getattr(text, "per_layer_config", None)
    return [text if own is None else own[n] for n in range(text.num_hidden_layers)]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32 (fp64 of fp64), summed over the labels that are not -100.

    `logits` is (..., V), `labels` (...). All labels ignored gives 0, with a gradient of 0.
    """
    return nn.functional.cross_entropy(
        at_least_fp32(logits.flatten(0, -2)), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def next_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """`next_token_loss` of each label: `logits` is (B, S, V), `labels` and the result (B, S)."""
    losses = nn.functional.cross_entropy(
        at_least_fp32(logits.flatten(0, -2)), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view(labels.shape)
