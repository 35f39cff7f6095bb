"""Architectures of transformers, as small as they can be, for tests that try every one of them."""

from functools import partial

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights
from parallel.weights import materialize

WINDOW = 5
"""For windows, chunks and what else sees a part of a document."""
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 128, "n_positions": 128,
    "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32, "ffn_hidden_size": 64, "mlp_bias": False,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "index_topk": WINDOW - 1,
    "index_n_heads": 2, "index_head_dim": 16, "keep_window_size": WINDOW - 1, "conv_L_cache": 3,
    "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "axk1",
    "axk2",
    "glm_moe_dsa",
    "youtu",
    "minicpm3",
    "glm4_moe_lite",
)
"""Types whose `head_dim` is that of the part with positions."""
UNTRIED = {
    "cohere_compass_text", "dbrx", "reformer", "inkling2_loop_text", "inkling2_text", "dots3_note_text", "blenderbot", "blt", "dots1", "longcat_flash", "gemma3n", "gemma3n_text", "lfm2_moe",
    "hunyuan_v1_dense", "deepseek_v2", "hunyuan_v1_moe", "ministral", "nemotron", "xmod", "zaya", "hy_v4",
    # made of several models, most of which have another type for their text
    "emu3", "gemma3", "gemma4", "got_ocr2", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant",
    "git", "llama4", "mllama", "musicgen", "musicgen_melody", "dots3_note", "apertus1p5_text",
}  # fmt: skip
"""Types that these few fields do not make small, or not consistently."""


def small(name, **changes):
    """A configuration of few numbers, with one layer of each kind at least."""
    default = AutoConfig.for_model(name)
    text = default.get_text_config()
    fields = {k: v for k, v in SMALL.items() if text.to_dict().get(k) is not None}
    if not getattr(text, "use_sliding_window", True):
        fields.pop("sliding_window", None)
    if name in LATENT:
        fields |= {"head_dim": 8, "num_key_value_heads": 4}
    for key in ("layer_types", "mlp_layer_types"):
        if kinds := list(dict.fromkeys(getattr(text, key, None) or ())):
            fields[key] = [kinds[n % len(kinds)] for n in range(4)]
    return AutoConfig.for_model(name, vocab_size=97, **fields, **changes)


def built(name, attention="auto", **changes):
    """A small model with random weights, in evaluation mode."""
    config = CausalLMConfig(type=name, attention=attention)
    model = build_causal_lm(config, small(name, **changes), packed=False)
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=0)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)  # so that what one token sees of another is no small part
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.nan_to_num_(0.5)  # what its own initialisation leaves out
    return model.eval()


NAMES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - UNTRIED)
