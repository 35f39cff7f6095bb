from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    transformers_config,
)
from models.stored_weights import locate, storage_rules
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import check_written, checksum, load_safetensors, materialize
from tests.ranks import run_ranks

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}
MODELS = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True},
    "qwen3": {"type": "qwen3", "tie_embeddings": True},
    "gpt_neox": {"type": "gpt_neox"},
    "mixtral": {"type": "mixtral", "config": {"num_local_experts": 3, "sliding_window": None}},
    "qwen3_moe": {
        "type": "qwen3_moe",
        "config": {"num_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    },
}


def build(name, path=None):
    changes = MODELS[name]
    config = CausalLMConfig(**(SIZES | changes), path=path)
    return build_causal_lm(config, transformers_config(config, 0))


def whole_state(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in (*model.named_parameters(), *model.named_buffers())
    }


def sharded(name, world_size, replicate=1):
    model = build(name)
    rules = storage_rules(model)
    config = ParallelConfig(replicate=replicate)
    parallelize(model, build_mesh(mesh_shape(config, world_size), "cpu"), config)
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=3)
    return model, rules


def check_init(name, world_size, replicate):
    model, _ = sharded(name, world_size, replicate)
    state = whole_state(model)
    local = sum(p.to_local().numel() for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {k: v.numpy() for k, v in state.items()}, local, tied


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "gpt_neox"])
def test_initial_weights_do_not_depend_on_the_ranks(name):
    [(alone, count, tied)] = run_ranks(1, check_init, name, 1, 1)
    for ranks, replicate in ((3, 1), (4, 2)):
        for state, local, still_tied in run_ranks(ranks, check_init, name, ranks, replicate):
            assert still_tied == tied
            assert local < count  # no rank keeps the whole model
            assert state.keys() == alone.keys()
            for key, value in state.items():
                assert (value == alone[key]).all(), key


def test_initial_weights_follow_the_architecture_and_differ_between_layers():
    [(state, _, _)] = run_ranks(1, check_init, "llama", 1, 1)
    a, b = (state[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert abs(a.std() - 0.02) < 0.002
    assert abs((a * b).mean()) < 1e-4
    assert (state["model.norm.weight"] == 1).all()
    assert state["model.rotary_emb.inv_freq"][0] == 1.0


def check_load(name, folder, world_size):
    model, rules = sharded(name, world_size)
    load_safetensors(model, folder, partial(locate, model, rules))
    return {k: v.numpy() for k, v in whole_state(model).items()}


@pytest.mark.parametrize("name", list(MODELS))
def test_loading_equals_from_pretrained(name, tmp_path):
    torch.manual_seed(5)
    config = CausalLMConfig(**(SIZES | MODELS[name]))
    original = AutoModelForCausalLM.from_config(transformers_config(config, 0))
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = {k: v.detach() for k, v in reference.named_parameters()}
    for state in run_ranks(2, check_load, name, tmp_path, 2):
        for key, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(state[key]), value, rtol=0, atol=0)


def check_bad_folder(folder):
    model, rules = sharded("llama", 1)
    try:
        load_safetensors(model, folder, partial(locate, model, rules))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_folder_of_another_model_is_refused(tmp_path):
    [message] = run_ranks(1, check_bad_folder, tmp_path)
    assert "holds no .safetensors file" in message
    other = CausalLMConfig(**(SIZES | {"hidden_size": 16}))
    AutoModelForCausalLM.from_config(transformers_config(other, 0)).save_pretrained(tmp_path / "a")
    [message] = run_ranks(1, check_bad_folder, tmp_path / "a")
    assert "has shape (101, 16)" in message
    assert "set the sizes under model.*" in message
    shallow = CausalLMConfig(**(SIZES | {"num_layers": 1}))
    AutoModelForCausalLM.from_config(transformers_config(shallow, 0)).save_pretrained(
        tmp_path / "b"
    )
    [message] = run_ranks(1, check_bad_folder, tmp_path / "b")
    assert "lacks 9 of the model's tensors" in message


def checksums(change):
    """Of two sharded matrices and a whole vector, one entry of which `change` may have altered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = [torch.randn(5, 3), torch.randn(2, 7).bfloat16(), torch.randn(4).double()]
    if change == "bit":
        whole[0].view(torch.int32)[4, 1] ^= 1
    if change == "swap":
        whole[1][0] = whole[1][0].flip(0)
    if change == "order":
        whole[0] = whole[0][[1, 0, 2, 3, 4]]
    sharded = [distribute_tensor(t, mesh, [Shard(0)]) for t in whole[:2]]
    replicated = distribute_tensor(whole[0], mesh, [Replicate()])
    return checksum([*sharded, whole[2], replicated])


def test_a_checksum_does_not_depend_on_shards_and_sees_every_bit():
    """More ranks than rows, so that some hold nothing."""
    found = {ranks: run_ranks(ranks, checksums, None) for ranks in (1, 2, 3)}
    assert len({number for numbers in found.values() for number in numbers}) == 1
    changed = {change: run_ranks(2, checksums, change)[0] for change in ("bit", "swap", "order")}
    assert len({found[1][0], *changed.values()}) == 4


class Careless(torch.nn.Module):
    """Whose initialisation knows of its weight only."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(3, 3)
        self.register_buffer("slope", torch.ones(2), persistent=False)
        self.register_buffer("places", torch.arange(4))


def test_tensors_that_nothing_writes_are_named():
    """Memory as it was found looks like numbers, and trains."""
    with torch.device("meta"):
        model = Careless()
    materialize(model, torch.device("cpu"), lambda m: hasattr(m, "bias") and m.weight.fill_(1), 0)
    with pytest.raises(ValueError, match=r"2 of the model's tensors .*\(line.bias, slope\).* set "):
        check_written(model)
    model.line.bias.data.zero_()
    model.slope.zero_()
    check_written(model)
