"""A sharded model trains as one process does, whatever is switched on."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize
from tests.ranks import run_ranks


def train(world_size, changes, vocab_size, tie, accumulation, steps=3):
    """Losses and final weights of a few plain SGD steps on 8 sequences split over ranks."""
    model_config = CausalLMConfig(
        num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1,
        head_dim=8, tie_embeddings=tie, attention="sdpa",
    )  # fmt: skip
    model = build_causal_lm(model_config, transformers_config(model_config, vocab_size))
    config = ParallelConfig(**changes)
    parallelize(model, build_mesh(mesh_shape(config, world_size), "cpu"), config)
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=1)
    tokens = torch.randint(vocab_size, (8, 12), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(steps):
        mine = tokens.chunk(world_size)[dist.get_rank()]
        total = torch.zeros(())
        micros = mine.chunk(accumulation)
        for number, micro in enumerate(micros, start=1):
            set_last_micro_batch(
                model, number == len(micros), every=config.reduce_every_micro_batch
            )
            loss = next_token_loss(model(input_ids=micro).logits[:, :-1], micro[:, 1:])
            (loss * world_size / 88).backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / 88)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.5 * p.grad)
                p.grad = None
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p
               for n, p in model.named_parameters()}  # fmt: skip
    return losses, {n: w.detach().numpy() for n, w in weights.items()}


@pytest.mark.parametrize(
    ("world_size", "changes", "vocab_size", "tie", "accumulation"),
    [
        (2, {}, 257, False, 1),
        (4, {}, 257, True, 2),
        (4, {"replicate": 2}, 33, True, 1),
        (3 + 1, {"reshard_after_forward": False}, 3, False, 1),  # fewer rows than ranks
        (2, {"activation_checkpointing": "block"}, 257, True, 1),
        (2, {"activation_checkpointing": "selective"}, 257, True, 1),
        (2, {"reduce_every_micro_batch": True}, 257, False, 4),
    ],
)
def test_sharded_training_equals_one_process(world_size, changes, vocab_size, tie, accumulation):
    [(expected, weights)] = run_ranks(1, train, 1, {}, vocab_size, tie, 1)
    for losses, state in run_ranks(
        world_size, train, world_size, changes, vocab_size, tie, accumulation
    ):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert losses[-1] < losses[0]
        for name, value in state.items():
            assert abs(value - weights[name]).max() < 1e-5, name


def check_bf16():
    losses, weights = train(2, {"param_dtype": "bfloat16"}, 257, True, 1)
    return losses, {w.dtype.name for w in weights.values()}


def test_bf16_computes_near_fp32_and_keeps_fp32_weights():
    [(expected, _)] = run_ranks(1, train, 1, {}, 257, True, 1)
    for losses, dtypes in run_ranks(2, check_bf16):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert dtypes == {"float32"}


@pytest.mark.slow
def test_compiled_blocks_train_the_same():
    [(expected, _)] = run_ranks(1, train, 1, {}, 257, True, 1)
    for changes in ({"compile": True}, {"compile": True, "activation_checkpointing": "block"}):
        results = run_ranks(2, train, 2, changes, 257, True, 1, timeout=240)
        for losses, _ in results:
            assert losses == pytest.approx(expected, abs=1e-5)
