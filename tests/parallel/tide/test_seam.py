"""Which groups TIDE serves, what it says of the others, and the odd ways in which FSDP2 is used."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from collectives.config import CollectivesConfig
from parallel.tide import reach as reaching
from parallel.tide import seam, use_tide
from parallel.tide.reach import Reach, reach
from parallel.tide.suitable import too_small
from tests.parallel.tide.training import Case, Toy, batch, build, loss_of, replaced, train
from tests.ranks import run_ranks


def check_one_rank():
    return use_tide(build(Case(), "stock")).stayed


def test_one_rank_stays_on_torchs_collectives():
    [stayed] = run_ranks(1, check_one_rank)
    assert stayed["the root"] == "it has one rank"
    assert len(stayed) == 5


class GathersItself(torch.Tensor):
    """What a quantised parameter is to FSDP2: it decides what is gathered."""

    def fsdp_pre_all_gather(self, mesh):
        return (self,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0], outputs


def check_fallbacks():
    model = Toy()
    fully_shard(model.blocks[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model.blocks[1])
    fully_shard(model.blocks[2])
    fully_shard(model.blocks[3])
    fully_shard(model)
    [group] = seam._param_groups(model.blocks[1]._get_fsdp_state())
    own = nn.Parameter(torch.ones(2)).data.as_subclass(GathersItself)
    with replaced(type(group.fsdp_params[0]), "_sharded_local_tensor", own):
        first = use_tide(model, node_size=8).stayed
    model.blocks[2].set_custom_all_gather(_fsdp_collectives.ProcessGroupAllocAllGather(None))
    torch._dynamo.config.compiled_autograd = True
    traced = use_tide(model, node_size=8).stayed
    torch._dynamo.config.compiled_autograd = False
    return first, traced


def test_groups_that_tide_cannot_serve_are_named_with_the_reason():
    for first, traced in run_ranks(2, check_fallbacks):
        assert first["blocks.0"] == "its parameters are offloaded"
        assert first["blocks.1"] == "a parameter gathers itself"
        assert set(traced.values()) == {"compiled autograd traces its collectives"}


def check_uneven():
    return use_tide(build(Case("toy"), "stock"), node_size=2).stayed


def test_nodes_that_a_group_does_not_fill_evenly():
    for stayed in run_ranks(3, check_uneven):
        assert all("set parallel.node_size to a size that divides" in s for s in stayed.values())
        assert len(stayed) == 5


def check_mixed():
    """One group on torch's collectives among others on TIDE; and custom collectives are respected."""

    class Custom(_fsdp_collectives.DefaultAllGather):
        pass

    def run(tide):
        model = build(Case("toy"), "stock")
        model.blocks[1].set_custom_all_gather(Custom())
        stayed = use_tide(model, node_size=8).stayed if tide else None
        loss = loss_of(Case("toy"), model, batch(Case("toy"), torch.Generator().manual_seed(1)), 0)
        loss.backward()
        grads = [p.grad.full_tensor() for p in model.parameters()]
        return stayed, grads

    stayed, grads = run(True)
    assert stayed == {"blocks.1": "it has the all-gather Custom"}
    assert all(torch.equal(a, b) for a, b in zip(grads, run(False)[1], strict=True))
    dist.barrier()


def test_groups_on_both_kinds_of_collectives_train_together():
    run_ranks(2, check_mixed)


def check_several_modules():
    """A group of two modules, as FSDP2 allows, is one layer."""

    def run(tide):
        torch.manual_seed(1)
        model = Toy()
        fully_shard([model.blocks[0], model.blocks[1]])
        fully_shard(model)
        if tide:
            [pool] = use_tide(model, node_size=8).pools
            assert [layer.name for layer in pool.layers] == ["the root", "blocks.0"]
        case = Case("toy")
        loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
    dist.barrier()


def test_a_group_of_several_modules():
    run_ranks(2, check_several_modules)


def check_slots(slots, prefetch):
    case = Case(parallel={"prefetch": prefetch}, tide={"slots": slots})
    model = build(case, "tide")
    try:
        loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0)
    except ValueError as error:
        dist.barrier()
        return str(error)
    dist.barrier()
    return len(model.tide.pools[0].slots)


@pytest.mark.parametrize(("slots", "prefetch", "found"), [(None, 0, 3), (None, 3, 5), (3, 2, 4)])
def test_there_are_as_many_slots_as_prefetching_needs(slots, prefetch, found):
    """And one more for the root."""
    assert run_ranks(2, check_slots, slots, prefetch) == [found, found]


@pytest.mark.parametrize(("slots", "prefetch"), [(2, 2), (1, 0)])
def test_fewer_slots_are_refused(slots, prefetch):
    for message in run_ranks(2, check_slots, slots, prefetch):
        assert message.startswith(f"collectives.slots={slots} cannot hold a layer and the")
        assert f"set collectives.slots={slots + 1}" in message


def check_forgotten(steps):
    """A block is prefetched but not run: its slot is taken back, and prefetching put off with a word."""
    case = Case("toy", skip=True, steps=steps)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(case, "tide")
    return [str(w.message) for w in said if "gathered ahead" in str(w.message)]


def test_layers_out_of_order_are_told_once():
    for said in run_ranks(2, check_forgotten, 4):
        assert len(said) == 1
        assert "blocks.1 is not gathered ahead while blocks.3 uses its memory" in said[0]


def check_inference_first():
    """What an evaluation allocates must be good for training."""
    case = Case()
    model = build(case, "tide")
    data = batch(case, torch.Generator().manual_seed(1))
    with torch.inference_mode():
        loss_of(case, model, data, 0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            assert not any(p.is_inference() for p in module.parameters(recurse=False))
    loss_of(case, model, data, 0).backward()
    dist.barrier()


def test_evaluation_may_come_first():
    run_ranks(2, check_inference_first)


def check_closed(cycles):
    for _ in range(cycles):
        case = Case("toy", node_size=1)
        model = build(case, "tide")
        loss_of(case, model, batch(case, torch.Generator().manual_seed(1)), 0).backward()
        dist.barrier()
        model.tide.close()


def test_ten_models_one_after_the_other():
    run_ranks(2, check_closed, 10)


def test_another_fsdp2_is_refused(monkeypatch):
    def changed(fsdp_params, group, something_new):
        pass

    monkeypatch.setattr(_fsdp_collectives, "foreach_all_gather", changed)
    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", changed)  # not dispatched yet
    with pytest.raises(RuntimeError, match="not one that TIDE knows .* set collectives=stock"):
        seam._dispatch()


@pytest.mark.parametrize(
    ("device", "transport", "says"),
    [
        ("cpu", "symm_mem", "collectives.transport=symm_mem is not for cpu"),
        ("cuda", "shm", "collectives.transport=shm is not for cuda"),
        ("mps", "auto", "there is no transport for mps"),
    ],
)
def test_devices_that_no_transport_fits(device, transport, says):
    assert reach(torch.device(device), transport, [0, 1], node_size=2) == Reach(None, says)


def test_cpu_ranks_share_memory():
    assert reach(torch.device("cpu"), "auto", [0, 1], node_size=2) == Reach("shm")


@pytest.mark.parametrize(
    ("wanted", "problem", "found"),
    [
        ("auto", None, Reach("nccl")),
        ("nccl", None, Reach("nccl")),
        ("symm_mem", None, Reach("symm_mem")),
        ("symm_mem", "NCCL is old", Reach("symm_mem")),
        ("auto", "NCCL is old", Reach("symm_mem", instead="not nccl: NCCL is old")),
        ("nccl", "NCCL is old", Reach("symm_mem", instead="not nccl: NCCL is old")),
    ],
)
def test_gpus_take_the_best_transport_there_is(monkeypatch, wanted, problem, found):
    monkeypatch.setattr(reaching, "unusable", lambda: problem)
    assert reach(torch.device("cuda", 0), wanted, [0, 1], node_size=2) == found


@pytest.mark.parametrize("problem", [None, "NCCL is old"])
def test_gpus_of_several_nodes_are_joined_by_nccl_where_it_is_asked_for(monkeypatch, problem):
    monkeypatch.setattr(reaching, "unusable", lambda: problem)
    found = Reach(None, problem) if problem else Reach("nccl")
    assert reach(torch.device("cuda", 0), "nccl", [0, 1], node_size=1) == found


def test_gpus_that_cannot_be_joined_are_named(monkeypatch):
    gpu = torch.device("cuda", 0)
    for wanted in ("auto", "symm_mem"):
        assert "of several nodes" in reach(gpu, wanted, [0, 1], node_size=1).reason
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in reach(gpu, "symm_mem", [0, 1], node_size=2).reason


def test_unknown_transports_are_refused():
    with pytest.raises(ValueError, match=r"collectives.transport=quantum"):
        CollectivesConfig(transport="quantum")


class SomeGroup:
    """As much of a parameter group as its size needs."""

    def __init__(self, device, *shapes):
        policy = SimpleNamespace(param_dtype=torch.bfloat16)
        self.device = torch.device(device)
        self.fsdp_params = [
            SimpleNamespace(_orig_size=torch.Size(shape), mp_policy=policy) for shape in shapes
        ]


@pytest.mark.parametrize(
    ("group", "smallest", "stays"),
    [
        (SomeGroup("cuda", (8192,)), None, True),
        (SomeGroup("cpu", (8192,)), None, False),
        (SomeGroup("cuda", (8192,)), 0, False),
        (SomeGroup("cuda", (32768, 1024)), None, False),
        (SomeGroup("cuda", *[(1024, 1024)] * 64), None, False),
        (SomeGroup("cuda", *[(512, 1024)] * 64), None, True),
    ],
)
def test_small_groups_stay_on_gpus(group, smallest, stays):
    assert (too_small(group, smallest) is not None) == stays
