"""The load-balance loss of transformers' mixtures: the same on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.causal_lm import CausalLMConfig
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.text.config import TextConfig
from recipes.text.packing import Sequence_S
from tests.ranks import run_ranks

MODEL = {
    "type": "qwen3_moe", "num_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 8, "vocab_size": 257,
    "config": {"num_experts": 6, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
               "norm_topk_prob": True, "initializer_range": 0.2},
}  # fmt: skip
LENGTHS = (12, 5, 9, 3, 7)


def task(balance=2.0, **model):
    config = CausalLMConfig(**(MODEL | model))
    data = TextConfig(sequence_length=16, packing="none")
    return PretrainTask(task=PretrainConfig(balance=balance), model=config, data=data, seed=0)


def samples():
    """Documents of several lengths: how much padding there is depends on which are together."""
    torch.manual_seed(1)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(257, (length + 1,)).numpy()
        found.append(Sequence_S(tokens[:-1], tokens[1:], torch.arange(length).numpy(), [0]))
    return found


def gradients(splits, checkpointing):
    """The loss of all samples, split over ranks at `splits`, and its gradients."""
    pretrain, config = task(), ParallelConfig(activation_checkpointing=checkpointing)
    config.reduce_dtype = "float64"  # not for users: so that all is exact
    world, rank = dist.get_world_size(), dist.get_rank()
    model = pretrain.build_model().double()
    parallelize(model, build_mesh(mesh_shape(config, world), "cpu"), config)
    materialize(model, torch.device("cpu"), pretrain.init_weights, seed=1)
    cuts = [0, *splits, len(LENGTHS)]
    batch = pretrain.collate(samples()[cuts[rank] : cuts[rank + 1]])
    set_last_micro_batch(model, last=True, every=False)
    loss = pretrain.loss(model, batch)
    (loss * world / sum(LENGTHS)).backward()
    total = loss.detach()
    dist.all_reduce(total)
    whole = {n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy()
             for n, p in model.named_parameters()}  # fmt: skip
    return total.item() / sum(LENGTHS), whole


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, gradients, (), "none")[0]


@pytest.mark.parametrize(("splits", "checkpointing"), [((2,), "block"), ((1, 4), "selective")])
def test_ranks_balance_as_one_process_does(splits, checkpointing, alone):
    """Wherever rows are, and where blocks are computed again: a router is heard once."""
    expected, wanted = alone
    for loss, grads in run_ranks(len(splits) + 1, gradients, splits, checkpointing):
        assert loss == pytest.approx(expected, abs=1e-6)
        for name, value in grads.items():
            assert abs(value - wanted[name]).max() < 1e-6, name  # norms and routers stay in fp32


def test_the_balance_is_a_part_of_the_loss_and_its_load_a_figure():
    losses = []
    for balance in (0.0, 2.0):
        pretrain = task(balance)
        model = pretrain.build_model().to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model.modules():
            pretrain.init_weights(module)
        batch = pretrain.collate(samples())
        losses.append(pretrain.loss(model, batch).item() / sum(LENGTHS))
    assert 2.0 <= losses[1] - losses[0] < 2.0 * 6
    with pretrain._routers.listening() as heard:
        pretrain._logits(model, batch)
    assert len(heard) == 2
    assert not pretrain.__getstate__()["_routers"]


def test_a_balance_for_a_model_without_experts_is_refused():
    with pytest.raises(
        ValueError, match=r"task.balance=2: models of type llama .* set task.balance=0"
    ):
        task(type="llama", config={}).build_model()
    with pytest.raises(ValueError, match="task.balance=-1 is too small"):
        PretrainConfig(balance=-1)
