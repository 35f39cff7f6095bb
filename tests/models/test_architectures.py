"""Every architecture of transformers, as small as it can be: packed documents do not see each other.

Ours, on two documents in one sequence, is compared with transformers' own attention on each alone.
A new architecture, or a new release of transformers, is tried with

    make test TESTS='-m long tests/models/test_architectures.py'
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.architectures import attention_kind, told_apart
from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights

LENGTHS = [13, 17]
WINDOW = 5
"""Shorter than the documents, for windows, chunks and what else sees a part of them."""
PACKED = ["llama", "qwen3", "gpt_neox", "phi3", "deepseek_v3"]
MASKED = ["mistral", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "afmoe", "llama4_text"]
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
    "cohere_compass_text", "dbrx", "dots1", "longcat_flash", "gemma3n", "gemma3n_text", "lfm2_moe",
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


def compare(name, **changes):
    config = CausalLMConfig(type=name)
    kind = attention_kind(config.attention, small(name, **changes))
    ours = build_causal_lm(config, small(name, **changes)).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in ours.modules():
        init_weights(ours, module)
    ours.tie_weights()
    with torch.no_grad():
        for weight in ours.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)  # so that what one token sees of another is no small part
    theirs = AutoModelForCausalLM.from_config(
        small(name, **changes), attn_implementation="eager" if kind == "eager" else "sdpa"
    )
    theirs.load_state_dict(ours.state_dict())
    buffers = dict(theirs.named_buffers())
    for key, buffer in ours.named_buffers():
        buffer.copy_(buffers[key])
    ours.eval(), theirs.eval()  # no dropout
    tokens_BS = torch.randint(2, 97, (2, sum(LENGTHS)))
    positions_BS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    ends = torch.tensor(2 * LENGTHS).cumsum(0)
    cu_seq_lens = torch.cat([torch.zeros(1), ends]).int()
    with torch.no_grad():
        given = told_apart(kind, ours.config, positions_BS, cu_seq_lens, max(LENGTHS))
        packed = ours(input_ids=tokens_BS, **given).logits
        alone = [
            theirs(input_ids=part, use_cache=False).logits
            for part in tokens_BS.split(LENGTHS, dim=1)
        ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
    return kind


@pytest.mark.parametrize("name", PACKED + MASKED)
def test_packed_documents_are_as_if_each_were_alone(name):
    """By flash attention's stand-in on the CPU, or by transformers' own attention with masks."""
    assert (compare(name) == "packed") == (name in PACKED)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - UNTRIED))
def test_every_architecture_keeps_documents_apart_or_is_refused(name):
    config = AutoConfig.for_model(name)
    changes = {"is_decoder": True} if hasattr(config, "is_decoder") else {}
    try:
        attention_kind("auto", AutoConfig.for_model(name, **changes))
    except ValueError as error:
        pytest.skip(str(error))
    compare(name, **changes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpt", "set model.type to"), ("stablelm", "set model.type to"),
        ("bamba", "carries a state"), ("rwkv", "carries a state"), ("bloom", "set model.type to"),
        ("falcon", "set model.type to"), ("xglm", "set model.type to"),
        ("minimax", "has layers of linear_attention, .* set .* or data.packing=none"),
        ("lfm3", "has layers of conv, .* set .* or data.packing=none"),
        ("roberta", "is an encoder"),
        ("doge", "has masks made of values, .* or data.packing=none"),
        ("deepseek_v32", "has layers of indexed_attention, .* or data.packing=none"),
        ("bert", r"is an encoder, .* set \+model.config.is_decoder=true"),
    ],
)  # fmt: skip
def test_architectures_that_cannot_keep_documents_apart_are_refused(name, words):
    with pytest.raises(ValueError, match=rf"model.type={name} .*{words}"):
        attention_kind("auto", AutoConfig.for_model(name))


@pytest.mark.parametrize("name", ["llama4_text", "doge", "deepseek_v32"])
def test_flash_attention_is_not_set_where_it_would_see_more(name):
    with pytest.raises(ValueError, match=rf"packed cannot run model.type={name}: set"):
        attention_kind("packed", AutoConfig.for_model(name), packed=False)
    assert attention_kind("auto", AutoConfig.for_model(name), packed=False) == "sdpa"


def test_an_encoder_becomes_a_decoder():
    assert compare("bert", is_decoder=True) == "sdpa"
