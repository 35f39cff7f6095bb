import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.causal_lm import (
    CausalLMConfig,
    attention_width,
    build_causal_lm,
    matmul_parameters,
    transformers_config,
)


def build(**fields):
    config = CausalLMConfig(**fields)
    return build_causal_lm(config, transformers_config(config, 257))


def test_models_are_built_on_meta_in_training_mode():
    model = build(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    assert model.training
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config.vocab_size == 257
    assert not model.config.use_cache


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama1b", 1.24), ("llama8b", 8.03), ("llama70b", 70.55), ("qwen3_30b_a3b", 30.53)],
)
def test_presets_have_the_published_sizes(preset, billions):
    import yaml

    with open(f"configs/model/{preset}.yaml") as file:
        model = build(**yaml.safe_load(file))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("tie", [True, False])
def test_flops_agree_with_torchs_counter(tie):
    """6 x matmul parameters per token and 12 x width per pair, against counting every product."""
    model = build(
        num_layers=2, hidden_size=32, intermediate_size=80, num_heads=4, num_kv_heads=2,
        head_dim=8, tie_embeddings=tie, attention="eager",
    ).to_empty(device="cpu")  # fmt: skip
    tokens = torch.randint(257, (3, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    dense_pairs = 3 * 16 * 16  # the eager path multiplies all pairs, masked or not
    expected = 6 * matmul_parameters(model) * 48 + 12 * attention_width(model) * dense_pairs
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_width_is_that_of_each_layer_s_queries(kind):
    """The second has layers with heads of another size."""
    model = build(type=kind)
    queries = [m.q_proj.out_features for m in model.modules() if hasattr(m, "q_proj")]
    assert attention_width(model) == sum(queries)
    assert len(set(queries)) == (1 if kind == "llama" else 2)


def test_folder_and_changes_together(tmp_path):
    config = CausalLMConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=99)
    transformers_config(config, 0).save_pretrained(tmp_path)
    read = transformers_config(CausalLMConfig(path=str(tmp_path), num_layers=5), 0)
    assert (read.num_hidden_layers, read.hidden_size, read.vocab_size) == (5, 64, 99)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "lama"}, "model.type=lama is not one of .* set model.type=llama"),
        ({"path": "does/not/exist"}, "model.path=does/not/exist is neither a folder"),
        ({"attention": "flash"}, "model.attention=flash is not one of auto, eager, packed, sdpa"),
        ({"num_layers": 0}, "model.num_layers=0 is too small"),
        ({"num_heads": 6, "num_kv_heads": 4}, "model.num_kv_heads=4 does not divide"),
        ({"load_weights": True}, "model.load_weights=true needs a folder"),
    ],
)
def test_what_cannot_be_built_says_what_to_set(fields, words):
    with pytest.raises(ValueError, match=words):
        transformers_config(CausalLMConfig(**fields), 257)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"config": {"hidden_act": "foo"}}, "model.type=llama cannot be built .KeyError"),
        ({"config": {"initialiser_range": 1.0}}, "set a field of model.config=initializer_range"),
    ],
)
def test_fields_that_cannot_be_are_named(fields, words):
    config = CausalLMConfig(**fields)
    with pytest.raises(ValueError, match=words):
        build_causal_lm(config, transformers_config(config, 257))


def test_small_vocabularies_fit_every_architecture():
    config = CausalLMConfig(
        type="phi3", num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2
    )
    assert build_causal_lm(config, transformers_config(config, 257)).config.vocab_size == 257


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        transformers_config(CausalLMConfig(path=str(tmp_path)), 257)
