import torch
from torch import nn

from models.causal_lm import CausalLMConfig, build_causal_lm, transformers_config
from parallel.blocks import find_blocks, large_leaves


def llama(**changes):
    config = CausalLMConfig(
        num_layers=3, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, **changes
    )
    return build_causal_lm(config, transformers_config(config, 257))


def test_blocks_of_a_transformers_model_are_its_layers():
    names = [name for name, _ in find_blocks(llama())]
    assert names == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_lists_inside_a_block_are_part_of_it():
    experts = [nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)] * 2)}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(experts), "head": nn.Linear(4, 4)})
    assert [name for name, _ in find_blocks(model)] == ["layers.0", "layers.1"]


def test_a_block_that_shares_a_parameter_with_the_outside_stays_in_the_root():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    model["head"] = nn.Linear(4, 4)
    model["head"].weight = model["layers"][1].weight
    assert [name for name, _ in find_blocks(model)] == ["layers.0"]


def test_large_untied_embeddings_are_groups_of_their_own_and_tied_ones_are_not():
    untied = llama(tie_embeddings=False, vocab_size=1000)
    names = [name for name, _ in large_leaves(untied, find_blocks(untied))]
    assert names == ["model.embed_tokens", "lm_head"]
    small = llama(tie_embeddings=False, vocab_size=10)
    assert large_leaves(small, find_blocks(small)) == []
    tied = llama(tie_embeddings=True, vocab_size=1000)
    assert large_leaves(tied, find_blocks(tied)) == []


def test_a_model_without_lists_has_no_blocks():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert find_blocks(model) == []
    assert large_leaves(model, []) == []
    assert torch.is_grad_enabled()
