"""Against transformers: the same logits from the same tensors, in both directions, and refusals."""

import json
from argparse import Namespace

import pytest
import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import AfmoeConfig, AutoModelForCausalLM

from models.hybrid.config import HybridConfig
from models.hybrid.hf import is_afmoe, read_folder, twin, write_folder
from models.hybrid.model import Hybrid, init_weights, whole
from models.hybrid.shape import Shape
from models.stored_weights import locate, storage_rules
from parallel.weights import load_safetensors
from tests.models.hybrid.cases import packed, small_model, small_shape

KINDS = ("sliding_window", "sliding_window", "full", "sliding_window", "full")
AFMOE = {
    "kinds": KINDS, "route_scale": 2.5, "shared_experts": 2, "dense_layers": 2,
    "block": Shape.block, "top_k": Shape.top_k,  # which Afmoe does not have
}  # fmt: skip


class Exactly(TorchFunctionMode):
    """fp64 wherever transformers' code rounds to fp32, so that the comparison can be exact."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if a is torch.float32 or a is torch.float else a for a in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def theirs(shape, dtype=torch.float32):
    """transformers' model with weights of its own, which are not all zeros or ones."""
    config = AfmoeConfig(**twin(shape).config.to_dict())
    torch.manual_seed(3)
    with Exactly() if dtype == torch.float64 else torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def load(folder, dtype=torch.float32):
    """Our model from a folder, as a run reads it."""
    shape = HybridConfig(path=str(folder), load_weights=True).shape(read_folder(str(folder)), 61)
    model = Hybrid(shape).to(dtype)
    for module in model.modules():
        init_weights(module, 0.02)
    other = twin(shape)
    rules = storage_rules(other)
    load_safetensors(model, folder, lambda stored: locate(other, rules, stored))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_our_logits_are_theirs(tied, tmp_path):
    """From a folder that they wrote, with experts stored one by one."""
    shape = small_shape(**AFMOE, tie_embeddings=tied)
    model = theirs(shape)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.2.mlp.experts.0.gate_proj.weight" in file.keys()  # noqa: SIM118
    assert HybridConfig(path=str(tmp_path)).shape(read_folder(str(tmp_path)), 61) == shape
    ours = load(tmp_path)
    tokens, documents = packed((40,))
    got = ours(tokens, whole(documents)).logits_TV
    torch.testing.assert_close(got, model(tokens[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_our_logits_and_gradients_are_theirs_to_the_last_digits_in_fp64():
    shape = small_shape(**AFMOE)
    model, ours = theirs(shape, torch.float64), Hybrid(shape).double()
    ours.load_state_dict(model.state_dict())
    tokens, documents = packed((40,))
    with Exactly():
        expected = model(tokens[None]).logits[0]
    got = ours(tokens, whole(documents)).logits_TV
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(got)
    got.backward(grad)
    with Exactly():
        expected.backward(grad)
    wanted = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-9, atol=1e-11)


def write(model, shape, out, **options):
    state = model.state_dict()
    options = {"dtype": "float32", "max_file_gib": 5.0} | options
    write_folder(
        shape, lambda names: {name: state[name].clone() for name in names}, out, Namespace(**options)
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_their_logits_are_ours(tied, tmp_path):
    """From a folder that we wrote."""
    shape = small_shape(**AFMOE, tie_embeddings=tied)
    ours = small_model(dtype=torch.float32, **AFMOE, tie_embeddings=tied)
    write(ours, shape, tmp_path)
    model, notes = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    tokens, documents = packed((40,))
    expected = ours(tokens, whole(documents)).logits_TV
    torch.testing.assert_close(model(tokens[None]).logits[0], expected, rtol=1e-5, atol=1e-5)


def test_kinds_that_transformers_does_not_have_come_back_to_us_only(tmp_path):
    shape = small_shape(router="softmax", rotary=("full", "block_topk"))
    ours = small_model(dtype=torch.float32, router="softmax", rotary=("full", "block_topk"))
    write(ours, shape, tmp_path)
    back = load(tmp_path)
    assert back.shape == shape
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    with pytest.raises(ValueError, match="springtide_hybrid"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_experts_bias_is_never_rounded(tmp_path):
    ours = small_model(dtype=torch.float32)
    write(ours, small_shape(), tmp_path, dtype="bfloat16")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
        bias = file.get_tensor("model.layers.1.mlp.expert_bias")
    assert torch.equal(bias, ours.model.layers[1].mlp.expert_bias)


def test_names_are_transformers():
    """Loading and exporting rely on it."""
    ours = Hybrid(small_shape())
    other = twin(small_shape())
    assert {n: t.shape for n, t in ours.state_dict().items()} == {
        n: t.shape for n, t in other.state_dict().items()
    }


def test_only_what_transformers_computes_is_called_afmoe():
    assert is_afmoe(small_shape(**AFMOE))
    assert is_afmoe(small_shape(kinds=("full",), rotary=("block_topk",)))
    for changes in (
        {"kinds": ("block_topk",)}, {"router": "softmax"}, {"rotary": ()},
        {"rotary": ("full", "sliding_window")},
    ):  # fmt: skip
        assert not is_afmoe(small_shape(**({"kinds": KINDS} | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "is a model of type llama, not afmoe"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu, but only silu is built here"),
        ({"attention_bias": True}, "has attention_bias=True"),
        ({"route_norm": False}, "has route_norm=False, but only True"),
        ({"score_func": "softmax"}, "has score_func=softmax, but only sigmoid"),
        ({"n_group": 4}, "has n_group=4, but only 1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"layer_types": ["chunked_attention"] * 5}, "has layers of type chunked_attention"),
    ],
    ids=str,
)
def test_folders_that_are_not_served_say_why(changes, words, tmp_path):
    about = twin(small_shape(**AFMOE)).config.to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="set model.path") as error:
        read_folder(str(tmp_path))
    assert words in str(error.value)


def test_a_folder_without_a_description_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json: set model.path"):
        read_folder(str(tmp_path))


def test_what_is_given_wins_over_the_folder():
    folder = {"kinds": KINDS, "hidden_size": 64, "vocab_size": 100}
    assert HybridConfig().shape(folder, 61) == Shape(**folder)
    assert HybridConfig(num_layers=3).shape(folder, 61).kinds == KINDS[:3]
    changed = HybridConfig(num_layers=8, sparse="sliding_window", window=9).shape(folder, 61)
    assert changed.kinds == (*("sliding_window",) * 3, "full") * 2
    assert (changed.window, changed.hidden_size) == (9, 64)
    assert HybridConfig(kinds=["full"]).shape(folder, 61).kinds == ("full",)
    assert HybridConfig(num_layers=2).shape({}, 61) == Shape(
        kinds=("block_topk",) * 2, vocab_size=61
    )
    with pytest.raises(ValueError, match=r"says how 5 layers attend: set model.full_every, too"):
        HybridConfig(num_layers=6).shape(folder, 61)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_weights": True}, "needs a folder: set model.path"),
        ({"sparse": "full"}, "model.sparse=full is not one of block_topk, sliding_window"),
        ({"kinds": ["full"], "num_layers": 1}, "set model.num_layers, model.full_every"),
        ({"num_heads": 6, "num_kv_heads": 4}, "set model.num_kv_heads to a divisor"),
        ({"kinds": []}, "model.num_layers=0 is too small"),
    ],
)
def test_nodes_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match="set model|is not one of") as error:
        HybridConfig(**changes)
    assert words in str(error.value)
