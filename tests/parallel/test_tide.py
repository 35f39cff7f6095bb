"""FSDP2 on TIDE trains as FSDP2 on torch's collectives does: bit for bit on two ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.tide.slots import SlotError
from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from parallel import tide as tide_seam
from parallel.blocks import find_blocks
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import use_tide
from parallel.weights import materialize
from tests.ranks import run_ranks


def build(parallel, tide, frozen=False, slots=2, prefetch=0, **sizes):
    sizes = {
        "num_layers": 4,
        "hidden_size": 12,
        "intermediate_size": 26,
        "tie_embeddings": True,
    } | sizes
    config = CausalLMConfig(num_heads=2, num_kv_heads=1, head_dim=6, attention="sdpa", **sizes)
    model = build_causal_lm(config, transformers_config(config, 37))
    if frozen:
        model.model.layers[1].requires_grad_(False)
        model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    settings = ParallelConfig(**parallel)
    world_size = dist.get_world_size()
    parallelize(model, build_mesh(mesh_shape(settings, world_size), "cpu"), settings)
    layers = [block for _, block in find_blocks(model)]
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(number - prefetch, 0) : number][::-1])
    materialize(model, torch.device("cpu"), partial(init_weights, model), seed=1)
    stayed = use_tide(model, slots=slots, chunk=100, timeout=20, poison=True) if tide else []
    return model, settings, stayed


def train(tide, parallel, options, steps=10, accumulation=1, evaluate=False):
    """Losses and final weights of AdamW steps; everything that FSDP2 does on the way is on."""
    model, settings, stayed = build(parallel, tide, **options)
    assert stayed == []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    losses = []
    for step in range(steps):
        for number in range(1, accumulation + 1):
            tokens = torch.randint(37, (2, 9), generator=generator)
            set_last_micro_batch(
                model, number == accumulation, every=settings.reduce_every_micro_batch
            )
            loss = next_token_loss(model(input_ids=tokens).logits[:, :-1], tokens[:, 1:]) / 16
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if evaluate and step % 3 == 0:
            with torch.no_grad():
                losses.append(model(input_ids=tokens).logits.float().sum().item())
    state = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in model.named_parameters()
    }
    dist.barrier()
    return losses, state


CASES = {
    "plain": ({}, {}, {}),
    "uneven": ({}, {"hidden_size": 10, "intermediate_size": 5}, {}),
    "fewer rows than ranks": ({}, {"hidden_size": 4, "intermediate_size": 1}, {}),
    "bf16": ({"param_dtype": "bfloat16"}, {}, {}),
    "bf16, summed in bf16": ({"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, {}, {}),
    "fp16": ({"param_dtype": "float16"}, {}, {}),
    "kept gathered": ({"reshard_after_forward": False}, {}, {}),
    "untied": ({}, {"tie_embeddings": False, "vocab_size": 500}, {}),
    "accumulation": ({}, {}, {"accumulation": 3}),
    "accumulation into shards": ({"reduce_every_micro_batch": True}, {}, {"accumulation": 3}),
    "bf16 accumulation": ({"param_dtype": "bfloat16"}, {}, {"accumulation": 2}),
    "recomputed": ({"activation_checkpointing": "block"}, {}, {}),
    "evaluation between": ({}, {}, {"evaluate": True}),
    "frozen": ({}, {"frozen": True}, {}),
    "prefetch of two": ({}, {"slots": 4, "prefetch": 2}, {}),
    "more slots": ({}, {"slots": 3}, {}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_equal_stock_bit_for_bit(case):
    parallel, options, keywords = CASES[case]
    arguments = (
        parallel,
        options,
        10,
        keywords.get("accumulation", 1),
        keywords.get("evaluate", False),
    )
    stock = run_ranks(2, train, False, *arguments)
    tide = run_ranks(2, train, True, *arguments)
    for (losses, state), (expected, weights) in zip(tide, stock, strict=True):
        assert losses == expected
        assert all((state[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(3, {}), (4, {"param_dtype": "bfloat16"}), (4, {"replicate": 2}), (8, {})],
)
def test_more_ranks_agree_to_rounding(world_size, parallel):
    """Sums in rank order differ from torch's in the last bits only."""
    stock = run_ranks(world_size, train, False, parallel, {})
    tide = run_ranks(world_size, train, True, parallel, {})
    tolerance = 3e-2 if "param_dtype" in parallel else 1e-4
    for (losses, state), (expected, weights) in zip(tide, stock, strict=True):
        assert losses == pytest.approx(expected, rel=tolerance)
        assert all(abs(state[n] - weights[n]).max() < tolerance for n in weights)
    # and all ranks hold the same
    assert all((tide[0][1][n] == state[n]).all() for _, state in tide for n in state)


def check_too_few_slots():
    model, _, _ = build({}, True, prefetch=2, slots=2)
    try:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    except SlotError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_more_prefetching_than_slots_is_refused_not_wrong():
    for message in run_ranks(2, check_too_few_slots):
        assert "set collectives.slots" in message


def check_storage():
    """The gathered bytes are the parameters: same address, and no other buffer of their size."""
    model, _, _ = build({}, True, num_layers=2)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            [group] = module._get_fsdp_state()._fsdp_param_groups
            module.unshard()
            for param, whole in zip(
                group.fsdp_params, group._all_gather_comm.gathered, strict=True
            ):
                assert param._unsharded_param.data_ptr() == whole.data_ptr()
            module.reshard()
    dist.barrier()


def test_parameters_live_in_the_slots():
    run_ranks(2, check_storage)


def check_one_rank():
    _, _, stayed = build({}, True)
    return stayed


def test_groups_that_tide_cannot_serve_are_named():
    [stayed] = run_ranks(1, check_one_rank)
    assert len(stayed) == 5
    assert stayed[0] == "the root stays on torch's collectives: it has one rank"


class Writes(TorchDispatchMode):
    """Notes the memory that every operation inside writes to."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        viewing = any(
            word in name for word in ("view", "slice", "select", "expand", "as_strided", "detach")
        )
        if not viewing:
            targets = args[0] if name.split(".")[1].endswith("_") else result
            for tensor in tree_leaves(targets):
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self.seen.append((name, tensor.data_ptr(), tensor.nbytes))
        return result


def check_zero_copy(monitored_steps, dtype):
    """Ranges that TIDE may write to: slots and staging, ours and the peers', and gradient shards."""
    model, _, _ = build({"param_dtype": dtype}, True)
    writes = Writes()
    outputs = []

    def watched(function):
        def call(*args, **kwargs):
            if "output_tensor" in kwargs:
                out = kwargs["output_tensor"]
                outputs.append((out.data_ptr(), out.nbytes))
            with writes:
                return function(*args, **kwargs)

        return call

    names = ("start", "__call__", "allocate")
    originals = {name: getattr(tide_seam.TideLayer, name) for name in names}
    for step in range(1 + monitored_steps):
        if step == 1:  # the first step allocates slots and staging
            for name in names[:2]:
                setattr(tide_seam.TideLayer, name, watched(originals[name]))
        tokens = torch.randint(37, (2, 9))
        next_token_loss(model(input_ids=tokens).logits[:, :-1], tokens[:, 1:]).backward()
    for name in names:
        setattr(tide_seam.TideLayer, name, originals[name])
    layer = next(m for m in model.modules() if isinstance(m, FSDPModule))._get_fsdp_state()
    shared = layer._fsdp_param_groups[0]._all_gather_comm.tide
    slots = {id(entry.slot): entry.slot for entry in shared.layers}.values()
    ranges = list(outputs)
    for region in [*(slot.region for slot in slots), shared.reduce.staging]:
        ranges += [
            (region.tensor(rank, 0, region.nbytes, torch.uint8).data_ptr(), region.nbytes)
            for rank in range(2)
        ]
    strays = [
        (name, nbytes)
        for name, pointer, nbytes in writes.seen
        if not any(begin <= pointer and pointer + nbytes <= begin + size for begin, size in ranges)
    ]
    dist.barrier()
    return len(writes.seen), strays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_written_but_parameters_shards_and_staging(dtype):
    for count, strays in run_ranks(2, check_zero_copy, 2, dtype):
        assert count > 100
        assert strays == []
