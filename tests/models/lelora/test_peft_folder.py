"""What is exported gives, loaded by peft on the untouched base model, what it gave in training."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.lelora.adapter import factors
from models.lelora.inject import is_linear
from models.lelora.peft_folder import check_tensors, merge, write_adapter
from models.lelora.verify import main as verify_main
from models.lelora.verify import verify
from tests.models.lelora.test_inject import gpt2
from tests.models.lelora.toys import ALL_KINDS, Adapted, llama, tokens, whole


def update_of(adapted):
    return lambda target: factors(adapted.kind, whole(adapted.adapters[target.name]))


def trained(model, kind, ids, base, targets=("all-linear",)):
    """Three switches, some matrices without a row at the end, and one that never had any."""
    model.save_pretrained(base)
    adapted = Adapted(model, kind, lr=5e-2, targets=targets)
    names = [t.name for t in adapted.targets]
    for components in ([0, 1], [1, 3, 4, 8], [0, 2, 3]):
        for name in names[1:]:
            adapted.switch(name, components, 1.25 if 3 in components else 1.0)
        adapted.train(3, ids)
    adapted.switch(names[2], [])
    return adapted


def written(adapted, folder, base, rank=None):
    folder.mkdir()
    linear = [n for n, m in adapted.model.named_modules() if is_linear(m)]
    return write_adapter(folder, adapted.targets, update_of(adapted), rank, str(base), "CAUSAL_LM",
                         {}, linear)  # fmt: skip


def loaded(base, *folders):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folders[0])
    for number, folder in enumerate(folders[1:], start=1):
        model.load_adapter(folder, adapter_name=f"other{number}")
    return model.eval()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_peft_loads_what_was_trained(tmp_path, kind, make):
    ids, base = tokens(), tmp_path / "base"
    adapted = trained(make(), kind, ids, base)
    done = written(adapted, tmp_path / "adapter", base)
    model = loaded(base, tmp_path / "adapter")
    with torch.no_grad():
        given, expected = model(input_ids=ids).logits, adapted.logits(ids)
        assert (given - expected).abs().max() < 1e-4
        merged = model.merge_and_unload()(input_ids=ids).logits
        assert (merged - expected).abs().max() < 1e-4
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == done.rank >= done.needed
    assert done.error == 0
    assert "logits change by up to" in verify(base, tmp_path / "adapter")
    plain = AutoPlain(base)
    assert not torch.allclose(plain(ids), adapted.logits(ids), atol=1e-3)


def AutoPlain(base):  # noqa: N802
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base).eval()

    def logits(ids):
        with torch.no_grad():
            return model(input_ids=ids).logits

    return logits


def llava():
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "initializer_range": 0.2}  # fmt: skip
    seeing = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **sizes)
    saying = LlamaConfig(vocab_size=40, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=seeing, text_config=saying, image_token_index=39, vision_feature_layer=-1
        )
    )


def test_a_model_that_sees_is_adapted_in_both_towers(tmp_path):
    from peft import PeftModel
    from transformers import LlavaForConditionalGeneration

    base, ids = tmp_path / "base", torch.tensor([[1, *[39] * 4, 5, 6, 7]])
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = llava()
    model.save_pretrained(base)
    adapted = Adapted(model, "dir_ab", lr=5e-2)
    assert {t.name.split(".")[1] for t in adapted.targets} == {
        "vision_tower", "multi_modal_projector", "language_model"
    }  # fmt: skip
    for components in ([0, 1], [1, 4]):
        adapted.switch_all(components)
        for _ in range(3):
            adapted.optimizer.zero_grad()
            model(input_ids=ids, pixel_values=pixels, labels=ids).loss.backward()
            adapted.optimizer.step()
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pixels).logits
        adapted.switch_all([3])
        switched = model(input_ids=ids, pixel_values=pixels).logits
    assert (switched - expected).abs().max() < 1e-5
    written(adapted, tmp_path / "adapter", base)
    untouched = LlavaForConditionalGeneration.from_pretrained(base)
    loaded = PeftModel.from_pretrained(untouched, tmp_path / "adapter").eval()
    with torch.no_grad():
        given = loaded(input_ids=ids, pixel_values=pixels).logits
    assert (given - expected).abs().max() < 1e-4


def test_merged_weights_are_the_base_and_the_update(tmp_path):
    ids = tokens()
    adapted = trained(llama(), "svd_ab", ids, tmp_path / "base")
    expected, update = adapted.logits(ids), update_of(adapted)
    with torch.no_grad():
        for target in adapted.targets:
            layer = adapted.model.get_submodule(target.name)
            layer.weight.copy_(merge(layer.weight, target, update))
            adapted.adapters[target.name].reset_parameters()
    assert (adapted.logits(ids) - expected).abs().max() < 1e-5


def test_truncation_says_what_it_loses(tmp_path):
    ids, base = tokens(), tmp_path / "base"
    adapted = trained(llama(), "dir_ab", ids, base)
    exact = written(adapted, tmp_path / "exact", base)
    assert exact.needed > 4
    cut = written(adapted, tmp_path / "cut", base, rank=4)
    assert 0 < cut.error < 1
    assert f"truncated: {cut.error:.2e} of the update is lost" in cut.words()
    wide = written(adapted, tmp_path / "wide", base, rank=32)
    assert "vLLM needs --max-lora-rank 32" in wide.words()
    lost, total = 0.0, 0.0
    tensors = load_file(tmp_path / "cut" / "adapter_model.safetensors")
    for target in adapted.targets:
        left, right = update_of(adapted)(target)
        name = f"base_model.model.{target.name}"
        again = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        lost += float((left @ right - again).square().sum())
        total += float((left @ right).square().sum())
    assert abs((lost / total) ** 0.5 - cut.error) < 1e-5


def test_two_adapters_of_one_base_are_swapped(tmp_path):
    ids, base = tokens(), tmp_path / "base"
    some = trained(llama(), "dir_ab", ids, base)
    other = trained(llama(), "left", ids, base)
    written(some, tmp_path / "some", base)
    written(other, tmp_path / "other", base, rank=16)
    model = loaded(base, tmp_path / "some", tmp_path / "other")
    with torch.no_grad():
        for name, adapted in (("default", some), ("other1", other), ("default", some)):
            model.set_adapter(name)
            assert (model(input_ids=ids).logits - adapted.logits(ids)).abs().max() < 1e-4


def test_a_short_name_that_means_more_is_written_in_full(tmp_path):
    base = tmp_path / "base"
    adapted = trained(llama(), "dir_ab", tokens(), base, ["*.layers.1.*_proj"])
    written(adapted, tmp_path / "adapter", base)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(t.name for t in adapted.targets)
    model = loaded(base, tmp_path / "adapter")
    with torch.no_grad():
        assert (model(input_ids=tokens()).logits - adapted.logits(tokens())).abs().max() < 1e-4


def test_an_adapter_that_changes_nothing_is_refused(tmp_path, capsys):
    base = tmp_path / "base"
    model = llama()
    model.save_pretrained(base)
    idle = Adapted(model, "dir_ab")
    idle.switch_all([0, 1])
    with pytest.raises(ValueError, match="changes nothing"):
        written(idle, tmp_path / "idle", base)
    adapted = trained(llama(), "dir_ab", tokens(), base)
    written(adapted, tmp_path / "adapter", base)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert verify_main([str(base), str(tmp_path / "adapter")]) == 0
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, file)
    assert verify_main([str(base), str(tmp_path / "adapter")]) == 1
    assert "the adapter changes nothing" in capsys.readouterr().err
    save_file({n.replace("base_model.model.", "model."): t for n, t in tensors.items()}, file)
    assert verify_main([str(base), str(tmp_path / "adapter")]) == 1
    assert "28 of 28 tensors were not loaded, such as model.model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3), torch.zeros(0, 4), torch.full((2, 2), torch.nan)]
)
def test_tensors_that_cannot_be_right_are_not_written(tensor):
    with pytest.raises(ValueError, match=r"x\.lora_A\.weight"):
        check_tensors({"x.lora_A.weight": tensor})
