"""Mixtures of transformers by our products, and what their routers did, against transformers itself."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from models.balance import balance_loss
from models.causal_lm import CausalLMConfig, build_causal_lm, init_weights, transformers_config
from models.routing import Listener, find_routers, routed
from tests.parallel.test_weights import MODELS, SIZES


def model_of(name, **changes):
    config = CausalLMConfig(**(SIZES | MODELS[name] | changes), attention="eager")
    model = build_causal_lm(config, transformers_config(config, 0)).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        init_weights(model, module)
    return model.double()


TOKENS = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_products_by_expert_are_transformers_own_loop(name):
    """Logits and gradients in fp64."""
    model, outs = model_of(name), []
    for kind in (model.config._experts_implementation, "eager"):
        model.set_experts_implementation(kind)
        logits = model(input_ids=TOKENS).logits
        outs.append((logits, *torch.autograd.grad(logits.square().sum(), model.parameters())))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_experts_of_another_form_are_left_to_transformers():
    """gpt_oss has biases, and the matrices the other way round."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "config": {"num_local_experts": 4}}
    config = CausalLMConfig(**(SIZES | sizes), type="gpt_oss", attention="eager")
    model = build_causal_lm(config, transformers_config(config, 0)).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        init_weights(model, module)
    outs = []
    for kind in (model.config._experts_implementation, "eager"):
        model.set_experts_implementation(kind)
        outs.append(model(input_ids=TOKENS).logits)
    torch.testing.assert_close(*outs)


def test_the_balance_of_one_layer_is_transformers_loss():
    """Theirs counts k visits a row, and takes layers together: one layer, divided by k, is the same."""
    model = model_of("qwen3_moe", num_layers=1)
    listener = Listener(model, "task.balance=1")
    with listener.listening() as heard:
        model(input_ids=TOKENS)
    visits, chances = routed(heard, torch.ones(18, dtype=torch.bool))
    expected = load_balancing_loss_func((heard[0][0],), num_experts=5, top_k=2) / 2
    torch.testing.assert_close(balance_loss(chances, visits, 18), expected, check_dtype=False)
    assert visits.sum() == 36


def test_rows_that_do_not_count_are_as_if_they_were_not_there():
    torch.manual_seed(0)
    logits, counted = torch.randn(12, 5), torch.rand(12) < 0.5
    heard = [(logits, logits.topk(2).indices)]
    fewer = [(logits[counted], logits[counted].topk(2).indices)]
    there = routed(heard, counted)
    alone = routed(fewer, torch.ones(int(counted.sum()), dtype=torch.bool))
    assert torch.equal(there.visits_LE, alone.visits_LE)
    torch.testing.assert_close(there.chances_LE, alone.chances_LE)


def test_a_model_without_routers_has_no_balance():
    with pytest.raises(
        ValueError, match=r"task.balance=1: models of type llama .* set task.balance=0"
    ):
        Listener(model_of("llama"), "task.balance=1")
    assert len(find_routers(model_of("qwen3_moe"))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_products_in_one_kernel_are_transformers_own():
    """In bf16, logits and gradients, within its rounding."""
    model, outs = model_of("qwen3_moe", hidden_size=64, head_dim=16).cuda().bfloat16(), []
    for kind in (model.config._experts_implementation, "grouped_mm"):
        model.set_experts_implementation(kind)
        logits = model(input_ids=TOKENS.cuda()).logits.float()
        outs.append((logits, *torch.autograd.grad(logits.square().mean(), model.parameters())))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=0.05, atol=0.02 * expected.abs().max().item()
        )
