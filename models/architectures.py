"""Which attention an architecture of transformers runs here, and whether it keeps documents apart.

Sequences hold several documents, which must not see each other. Nothing in transformers promises
that: a layer may carry a state from one document into the next, or make its mask without looking at
positions. What is refused or served apart here is what `tests/models/test_architectures.py` finds,
which compares every architecture with one document at a time.

Legend: B sequences in the batch, S tokens a sequence.
"""

from typing import Any

import torch
from torch import Tensor

from models.attention import SharedRows, document_mask
from models.sharing import check_shareable

MASKED = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that see what a mask shows them, and nothing else."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What configurations call dropout inside attention."""
MASKS_FROM_VALUES = ("doge",)
"""Types that add to the mask what they make of the values."""
COUNTING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
            "xlm-roberta-xl", "xmod")  # fmt: skip
"""Types whose positions begin after that of padding, and are counted by the model itself."""
NO_POSITIONS = ("afmoe", "gpt_oss")
"""Types that make their masks without the positions, which is where documents begin."""


def attention_kind(
    attention: str, hf_config: Any, packed: bool = True, shared: bool = False
) -> str:
    """`packed`, `sdpa` or `eager`: what `model.attention` means for this architecture.

    `packed` says whether sequences hold several documents, `shared` whether ranks share them. Raises
    `ValueError` for architectures that cannot do so, for those with a state, whatever is set, and for
    encoders, which see what they should predict.
    """
    kind = _model_class(hf_config)
    if kind is None:  # code that came with the folder
        return "eager" if attention == "auto" else attention
    name, text = f"model.type={hf_config.model_type}", hf_config.get_text_config()
    if getattr(kind, "_is_stateful", False):
        raise ValueError(
            f"{name} carries a state from token to token, which would run from one packed document into "
            "the next: set model.type to one with attention only"
        )
    if _has_masked_words(hf_config) and not hf_config.is_decoder:
        raise ValueError(
            f"{name} is an encoder, whose tokens see those after them: set "
            "+model.config.is_decoder=true, or model.type to another"
        )
    layers = set(getattr(text, "layer_types", None) or ())
    others = [f"layers of {layer}" for layer in sorted(layers.difference(MASKED))]
    others += ["masks made of values"] if text.model_type in MASKS_FROM_VALUES else []
    others += ["positions of its own"] if text.model_type in COUNTING else []
    if packed and others:
        raise ValueError(
            f"{name} has {', '.join(others)}, which do not keep packed documents apart: set "
            "model.type to another, or data.packing=none"
        )
    pluggable = bool(getattr(kind, "_supports_attention_backend", False))
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    drops = any(getattr(text, field, 0) for field in DROPOUTS)
    plain = pluggable and not (capped or drops or others or "chunked_attention" in layers)
    if attention == "packed" and not plain:
        raise ValueError(f"model.attention=packed cannot run {name}: set model.attention=auto")
    if shared:
        check_shareable(hf_config, attention, plain)
        return "packed"
    if attention != "auto":
        return attention
    if not pluggable and packed:
        raise ValueError(
            f"{name} has an attention of its own, which does not keep packed documents apart: set "
            "model.type to another, or data.packing=none"
        )
    if plain and not window:
        return "packed"
    return "sdpa" if getattr(kind, "_supports_sdpa", False) and not capped else "eager"


def told_apart(
    kind: str,
    config: Any,
    positions_BS: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    shared_rows: SharedRows | None = None,
) -> dict[str, Any]:
    """What a model is given besides its tokens, so that documents do not see each other.

    `kind` is as `attention_kind` says, `config` the built model's. A document begins where positions
    are 0, and where `cu_seq_lens` say; `max_length` is the longest one's.
    """
    given: dict[str, Any] = {"position_ids": positions_BS}
    if kind == "packed":
        given |= {f"cu_seq_lens_{side}": cu_seq_lens for side in "qk"}
        given |= {f"max_length_{side}": max_length for side in "qk"}
        if shared_rows is not None:
            given["shared_rows"] = shared_rows
        elif positions_BS.device.type == "cpu":  # no flash kernel: one mask serves all layers
            given["attention_mask"] = document_mask(cu_seq_lens, *positions_BS.shape)
    elif config.get_text_config().model_type in NO_POSITIONS or _has_masked_words(config):
        from transformers.masking_utils import create_masks_for_generate

        # 16 bits: added to wider scores it leaves them as wide as they are
        like_BS1 = positions_BS.new_empty((*positions_BS.shape, 1), dtype=torch.bfloat16)
        given["attention_mask"] = create_masks_for_generate(
            config, like_BS1, None, None, position_ids=positions_BS
        )
    return given


def _model_class(hf_config: Any) -> Any:
    """The class that transformers builds for a configuration, or None if it does not know one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)


def _has_masked_words(hf_config: Any) -> bool:
    """Whether it was made to be trained on masked words, and can be told to be a decoder."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    return (
        hasattr(hf_config, "is_decoder")
        and not getattr(hf_config, "is_encoder_decoder", False)
        and (
            type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING
            or hf_config.model_type == "bert-generation"
        )
    )
