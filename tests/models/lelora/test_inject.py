import pytest
import torch
from torch import nn

from models.lelora.inject import find_targets, inject, matrix_kind
from tests.models.lelora.toys import ALL_KINDS, Adapted, llama, tokens


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=40, n_positions=32, bos_token_id=0,
                   eos_token_id=1, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    )  # fmt: skip


def names(model, wanted, exclude=()):
    return [t.name for t in find_targets(model, wanted, exclude)]


def test_layers_are_named_by_their_end_a_glob_or_all():
    model = llama()
    assert len(names(model, ["all-linear"])) == 14
    assert names(model, ["q_proj"]) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert names(model, ["*.layers.1.mlp.*"], ["up_proj"]) == [
        "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"
    ]  # fmt: skip
    assert names(model, ["lm_head"]) == ["lm_head"]
    target = find_targets(model, ["all-linear"], [])[-1]
    assert (target.layer, target.kind, target.shape.outputs, target.shape.inputs) == (
        1,
        "down",
        32,
        48,
    )


@pytest.mark.parametrize(
    ("wanted", "exclude", "words"),
    [
        (
            ["q_porj"],
            [],
            "lelora.targets: q_porj names no linear layer.*set lelora.targets to q_proj",
        ),
        (["q_proj", "nothing"], [], "lelora.targets: nothing names no linear layer; there are"),
        (["all-linear"], ["k_prj"], "lelora.exclude: k_prj names no linear layer.*to k_proj"),
        (["q_proj"], ["q_proj"], "leaves none of the layers"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error(wanted, exclude, words):
    with pytest.raises(ValueError, match=words):
        names(llama(), wanted, exclude)


def test_tied_embeddings_are_refused_and_left_out_by_default():
    model = llama(tied=True)
    assert "lm_head" not in names(model, ["all-linear"])
    with pytest.raises(ValueError, match=r"lm_head shares its weight with model.embed_tokens"):
        names(model, ["lm_head"])


def test_quantised_weights_and_stacks_of_experts_are_refused():
    model = llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="load the base model unquantised"):
        names(model, ["q_proj"])

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 3, 2))

    model.model.layers[0].mlp.experts = Experts()
    for entry in ("experts", "gate_up_proj"):
        with pytest.raises(ValueError, match="experts are one stack of matrices"):
            names(model, [entry])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert.encoder.layer.0.attention.self.query", "q"),
        ("bert.encoder.layer.0.attention.output.dense", "o"),
        ("bert.encoder.layer.0.output.dense", "fc2"),
        ("bert.encoder.layer.0.intermediate.dense", "fc1"),
        ("transformer.h.3.attn.c_proj", "o"),
        ("transformer.h.3.mlp.c_proj", "fc2"),
        ("model.vision_tower.blocks.1.mlp.w3", "up"),
        ("bert.pooler.dense", "other"),
    ],
)
def test_what_a_matrix_is_for_follows_from_its_name(name, kind):
    assert matrix_kind(name) == kind


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_gpt2_stores_its_matrices_the_other_way_round(kind):
    """Its adapters are those of the matrix as it acts: merged, they give what they gave beside it."""
    from models.lelora.adapter import factors
    from tests.models.lelora.toys import whole

    ids = tokens()
    adapted = Adapted(gpt2(), kind, lr=0.1)
    target = adapted.targets[0]
    assert (target.shape.outputs, target.shape.inputs) == (96, 32)
    adapted.switch_all([0, 2, 9])
    adapted.train(4, ids)
    adapted.switch_all([2, 11])
    adapted.train(2, ids)
    beside = adapted.logits(ids)
    with torch.no_grad():
        for target in adapted.targets:
            left, right = factors(kind, whole(adapted.adapters[target.name]))
            layer = adapted.model.get_submodule(target.name)
            layer.weight += target.oriented((left @ right).float())
            adapted.adapters[target.name].reset_parameters()
    assert (adapted.logits(ids) - beside).abs().max() < 1e-5
    assert beside.std() > 0.01


def test_only_adapters_train_and_the_base_keeps_its_names():
    model = llama()
    before = set(model.state_dict())
    inject(model, find_targets(model, ["v_proj"], []), "dir_ab", 8, 16)
    assert before < set(model.state_dict())
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all(".v_proj.adapter." in name for name in trained)


def test_a_matrix_with_few_components_gets_few_rows():
    adapted = Adapted(llama(), "dir_ab", rows=20)
    rows = {t.kind: adapted.adapters[t.name].rows for t in adapted.targets}
    assert rows["k"] == 16
    assert rows["q"] == 20


def test_a_compiled_layer_is_not_compiled_anew_when_its_scale_changes():
    adapted, ids = Adapted(llama(), "dir_ab"), tokens()
    adapted.switch_all([0, 1])
    adapted.train(2, ids)
    target = adapted.targets[0]
    layer = adapted.model.get_submodule(target.name)
    x = torch.randn(2, 3, target.shape.inputs)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    for scale in (1.0, 0.625, 1.6):
        adapted.switch(target.name, [0, 1], scale)
        with torch.compiler.set_stance("default" if scale == 1.0 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(x), layer(x))
