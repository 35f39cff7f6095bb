"""Plans against what was measured on GPUs, and their arithmetic against counting."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tide.models import build
from collectives.config import CollectivesConfig
from parallel.blocks import find_blocks
from parallel.mesh import ParallelConfig
from parallel.recompute import recompute
from trainer.devices import chosen_device, device_by_name
from trainer.dry_run.duration import MEMORY, duration
from trainer.dry_run.forecast import resolved
from trainer.dry_run.lines import layout
from trainer.dry_run.memory import Group, estimate, groups_of
from trainer.dry_run.probe import Moment, Probe, probe
from trainer.dry_run.wire import Wire, bytes_sent
from trainer.errors import ConfigError
from trainer.plan import Plan

RESULTS = Path(__file__).parent.parent.parent.parent / "benchmarks" / "results"
H200 = device_by_name("NVIDIA H200")
GPU = resolved(CollectivesConfig(), H200)
STOCK = replace(GPU, name="stock")


@pytest.mark.parametrize(
    ("file", "length"),
    [
        ("tide-2xH200", 1024),
        ("tide-2xH200", 8192),
        ("tide-8b-2xH200", 8192),
        ("tide-qwen3_30b_a3b-2xH200", 4096),
        ("tide-wan22-2xH200", 16384),
    ],
)
def test_memory_is_within_a_tenth_of_what_gpus_took(file, length):
    """Five shapes, on TIDE and on torch's collectives: tensors of the allocator and slots, at most."""
    if "wan" in file:
        pytest.importorskip("diffusers")
    result = json.loads((RESULTS / f"{file}.json").read_text())
    work = build(result["config"])
    model = work.model.bfloat16()
    parallel = ParallelConfig(param_dtype="bfloat16", **result["config"].get("parallel", {}))
    groups = groups_of(model, parallel)
    for _, block in find_blocks(model):
        recompute(block, parallel.activation_checkpointing)
    batch = work.draw(1, length, torch.device("meta"))
    found = probe(model, [g.parameters for g in groups], lambda: work.loss(model, batch))
    for settings in (STOCK, GPU):
        measured = result["summary"]["kinds"][f"{settings.name}, {length} tokens"]["memory"]
        took = measured["allocator"] + measured.get("slots", 0) + measured.get("staging", 0)
        planned = estimate(groups, found, 2, parallel, settings, accumulation=1).total
        assert planned == pytest.approx(took, rel=0.1), settings.name


def group(name, numel, reshards=True):
    return Group(name, [torch.nn.Parameter(torch.empty(numel // 64, 64, device="meta"))], reshards)


MIB = 2**20
GROUPS = [
    group("embedding", 64 * MIB, False),
    group("0", 128 * MIB),
    group("1", 128 * MIB),
    group("norm", 64, False),
]
PROBE = Probe(moments=[Moment(100 * MIB, 0), Moment(60 * MIB, 128 * MIB), Moment(0, 320 * MIB)])
BF16 = ParallelConfig(param_dtype="bfloat16")


def memory(parallel=BF16, settings=GPU, shards=4, accumulation=1):
    return estimate(GROUPS, PROBE, shards, parallel, settings, accumulation)


def test_what_stays_on_a_rank():
    found = memory()
    assert found.weights == 4 * (80 * MIB + 64)  # the norm's only row is the first rank's
    assert found.optimizer == 2 * found.weights
    # The last moment needs most: all gradients are there, sharded.
    assert found.gradients == pytest.approx(found.weights, rel=1e-6)
    assert found.activations == 0
    # Two slots of the largest block, one for the embedding; the norm is left to torch.
    assert found.gathered == pytest.approx((2 * 128 + 64) * MIB * 2, rel=1e-4)
    assert found.cast == 80 * MIB * 2  # nor is it cast
    assert memory(settings=STOCK).cast == 0


def test_micro_batches_keep_whole_gradients_unless_each_is_reduced():
    assert memory(accumulation=4).gradients == pytest.approx(4 * 320 * MIB, rel=0.1)
    every = replace(BF16, reduce_every_micro_batch=True)
    assert memory(every, accumulation=4).gradients == pytest.approx(memory().gradients, rel=1e-6)
    half = replace(BF16, reduce_dtype="bfloat16")
    assert memory(half, accumulation=4).gradients < memory(accumulation=4).gradients


def test_one_rank_gathers_nothing():
    found = memory(shards=1, parallel=ParallelConfig())
    assert (found.gathered, found.staging, found.cast) == (0, 0, 0)
    assert found.weights == 4 * (320 * MIB + 64)


def sent(mesh, node_size, settings=GPU, parallel=BF16, accumulation=1):
    return bytes_sent(GROUPS, mesh, node_size, parallel, settings, accumulation)


def test_bytes_on_the_wire():
    whole, blocks, tail = 320 * MIB + 64, 256 * MIB, 64
    found = sent({"shard": 4}, 8)
    assert found.gather_forward == whole * 2 * 3 / 4
    assert found.gather_backward == blocks * 2 * 3 / 4
    assert found.reduce_scatter == ((whole - tail) * 2 + tail * 4) * 3 / 4
    assert (found.all_reduce, found.across) == (0, 0)
    assert sent({"shard": 4}, 8, STOCK).reduce_scatter == whole * 4 * 3 / 4
    four = sent({"shard": 4}, 8, accumulation=4)
    assert four.gather_forward == 4 * found.gather_forward
    assert four.reduce_scatter == found.reduce_scatter
    assert sent({"shard": 1}, 8).total == 0


def test_bytes_between_nodes_enter_a_node_once():
    """8 ranks on 4 nodes: every node gets 3/4 of everything from others, half of it by each rank."""
    found = sent({"shard": 8}, 2)
    moved = (found.gather_forward + found.gather_backward + found.reduce_scatter) / (7 / 8)
    assert found.across == pytest.approx(moved * 3 / 4 / 2)
    copies = sent({"replicate": 2, "shard": 4}, 4)
    assert copies.across == copies.all_reduce == pytest.approx((80 * MIB + 16) * 4)


def divided(experts):
    """256 Mi elements of experts in all, on 8 ranks in nodes of 4."""
    part = torch.empty(64 // experts, 2048, 2048, device="meta")
    groups = [*GROUPS, Group("experts 0", [torch.nn.Parameter(part)], True, experts)]
    settings = replace(BF16, experts=experts)
    sizes = bytes_sent(groups, {"shard": 8}, 4, settings, STOCK, 2, rows=10.0)
    return estimate(groups, PROBE, 8, settings, STOCK, 1), sizes


def test_experts_that_are_divided_are_gathered_in_part_only():
    (whole, every), (few, parts) = divided(1), divided(4)
    assert few.weights == pytest.approx(whole.weights, rel=1e-6)
    blocks, kept, mine = 128 * MIB, 64 * MIB + 64, 64 * MIB
    assert whole.gathered == 2 * (2 * 256 * MIB + kept)
    assert few.gathered == 2 * (2 * (blocks + mine) + kept)  # a block, and its experts
    own = 320 * MIB + 64
    assert every.gather_forward == 2 * 2 * (own + 256 * MIB) * 7 / 8
    assert parts.gather_forward == 2 * 2 * (own * 7 / 8 + mine * 1 / 2)
    assert parts.rows == 20.0
    # All of it enters a node once, in either case, for the ranks there together.
    assert parts.across == pytest.approx(every.across, rel=1e-6)


def test_time_is_compute_and_what_it_does_not_hide():
    watched = Probe(matmul_flops=[1e12, 2e12], moved=[1e9, 2e9])
    nothing, much = Wire(0, 0, 0, 0, 0), Wire(1e11, 1e11, 1e11, 0, 0)
    free = duration(watched, 4e12, 1, GROUPS, 4, nothing, "tide", H200)
    assert free.exposed == 0
    assert free.total == free.forward + free.backward + free.optimizer
    assert 1e12 / H200.flops < free.forward < 4 * 1e12 / H200.flops
    slow = duration(watched, 4e12, 1, GROUPS, 4, much, "tide", H200)
    assert slow.exposed > 3e11 / H200.link_rate - free.total
    assert slow.forward == free.forward
    assert duration(watched, 4e12, 1, GROUPS, 4, much, "stock", H200).total > slow.total
    rows = replace(nothing, rows=1e9)
    waits = duration(watched, 4e12, 1, GROUPS, 4, rows, "tide", H200).exposed
    assert 1e9 / H200.link_rate < waits < 4e9 / H200.link_rate


def test_casts_and_layouts_take_time_on_a_single_rank_too():
    watched, nothing = Probe(matmul_flops=[0, 0], moved=[0, 0]), Wire(0, 0, 0, 0, 0)
    numel = sum(group.numel for group in GROUPS)
    again = sum(group.numel for group in GROUPS if group.reshards)
    pace = MEMORY * H200.memory_rate
    for name in ("stock", "tide"):
        alone = duration(watched, 0, 1, GROUPS, 1, nothing, name, H200)
        assert alone.forward == pytest.approx(10 * numel / pace)
        assert alone.backward == pytest.approx((10 * again + 14 * numel) / pace)
    stock, tide = (duration(watched, 0, 1, GROUPS, 4, nothing, n, H200) for n in ("stock", "tide"))
    assert stock.forward == pytest.approx((4 + 10 / 4) * numel / pace)
    assert tide.forward == pytest.approx(6 / 4 * numel / pace)
    assert tide.backward == 0


def plan_of(**mesh):
    import math

    size = math.prod(mesh.values())
    return Plan(size, mesh, size, 1, 1, 1, 1)


def test_who_is_with_whom():
    assert list(layout(plan_of(shard=64), 8)) == ["8 nodes of 8", "shard 64: ranks 0-63"]
    assert list(layout(plan_of(replicate=2, shard=4), 4)) == [
        "2 nodes of 4",
        "replicate 2: ranks 0,4  1,5  2,6  ... 4 in all",
        "shard 4: ranks 0-3  4-7",
    ]
    assert list(layout(plan_of(shard=2, sequence=2), 4))[1:] == [
        "shard 2: ranks 0,2  1,3",
        "sequence 2: ranks 0,1  2,3",
        "weights are sharded over shard and sequence: 4 ranks",
    ]
    assert list(layout(plan_of(shard=16), 8, 4))[2] == (
        "experts divided by 4: ranks 0-3  4-7  8-11  ... 4 in all; each sharded over 4"
    )
    assert list(layout(plan_of(shard=1), 1)) == ["1 node of 1", "shard 1: ranks 0"]


def test_devices_are_known_by_any_spelling():
    assert device_by_name("h200") == device_by_name("NVIDIA H200")
    assert device_by_name("NVIDIA H100 80GB HBM3").name == "H100"
    assert device_by_name("NVIDIA H100 PCIe").name == "H100 PCIe"
    assert device_by_name("Radeon") is None
    with pytest.raises(
        ConfigError, match="launch.device=tpu is not known: set launch.device to one of a10, "
    ):
        chosen_device("tpu")


def test_what_does_not_train_has_no_gradients_and_no_moments():
    frozen, trained = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 8, bias=False)
    frozen.requires_grad_(False)
    groups = [Group("block", [*frozen.parameters(), *trained.parameters()], True)]
    found = estimate(groups, Probe(moments=[Moment(0, 8 * 64)]), 2, ParallelConfig(), STOCK, 1)
    assert found.weights == 4 * (64 + 8) * 64 // 2
    assert found.optimizer == 2 * 4 * 8 * 64 // 2
    assert found.gradients == 4 * 8 * 64 // 2
