"""What ranks check of experts that they divide: against one process, in fp64.

`check_divided` runs on every rank; rank 0 holds the whole model, too, and compares.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from collectives.config import CollectivesConfig
from parallel.fsdp import choose_collectives, parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, SequenceConfig, build_mesh, mesh_shape
from parallel.norm import global_norm
from parallel.sequence import SequenceRanks
from parallel.weights import checksum, materialize
from recipes.text.planned import Unread
from tests.models.hybrid.cases import MIXES
from tests.recipes.repacked import as_one_process, check_order, clipped, samples_of
from tests.recipes.test_hybrid import batch_of, part_of, task
from tests.recorder import Recorder

SHAPE = {"num_experts": 8, "init_std": 0.2}
UNVISITED = 5
SHARED_MIXES = [(13, 1, 30, 7), (3, 3, 3), (21, 40)]


@dataclass(frozen=True)
class Case:
    """How ranks divide experts, and what else they do."""

    experts: int
    splits: tuple[int, ...] = ()
    """The first rank has the documents before the first of these, and so on."""
    settings: dict = field(default_factory=dict)
    """Of `ParallelConfig`."""
    sequence: int = 1
    """Ranks that share documents; `splits` is not used then."""
    unvisited: bool = False
    """One expert gets no rows from any rank."""
    every: bool = False
    """Reduce gradients after each micro-batch."""
    collectives: str = "stock"
    steps: int = 1
    counted: bool = False
    """Record every exchange."""


def check_divided(cases):
    """Losses, gradients, norms and weights. Returns checksums of first weights, and what TIDE serves."""
    return [_check(case) for case in cases]


def _check(case):
    world, rank = dist.get_world_size(), dist.get_rank()
    config = ParallelConfig(
        experts=case.experts, sequence=SequenceConfig(size=case.sequence), **case.settings
    )
    config.reduce_dtype = "float64"  # not for users: so that all is exact
    mesh = build_mesh(mesh_shape(config, world), "cpu")
    ours, alone = task(model=SHAPE), task(model=SHAPE)
    if case.sequence > 1:
        place, group = mesh.get_local_rank("sequence"), mesh.get_group("sequence")
        ours.share_sequences(SequenceRanks(case.sequence, place, group))
    model, single = ours.build_model().double(), alone.build_model().double()
    parallelize(model, mesh, config, ours.experts(model))
    chosen = choose_collectives(
        model,
        CollectivesConfig(name=case.collectives, smallest=0),
        None,
        config.prefetch,
        30,
        _fail,
    )
    optimizers = []
    for each in (model, single):
        materialize(each, torch.device("cpu"), ours.init_weights, seed=1)
        if case.unvisited:
            for layer in each.model.layers[1:]:
                layer.mlp.expert_bias[UNVISITED] = -100.0
        optimizers.append(torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True))
    first = checksum(model.parameters())
    bound = 1e-10 if case.collectives == "stock" else 1e-6  # TIDE sums in fp32
    for step in range(case.steps):
        found = _gradients(case, ours, model, step)
        grads = [p.grad for p in model.parameters()]
        norm, _ = global_norm([grad.float() for grad in grads], torch.zeros(1))
        whole = [_whole(grad) for grad in grads]
        _update(optimizers[0], grads, world)
        weights = [_whole(p) for p in model.parameters()]
        if rank == 0:
            with as_one_process():
                expected = _gradients(case, alone, single, step)
            grads = [p.grad for p in single.parameters()]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=str(case))
            torch.testing.assert_close(whole, grads, rtol=0, atol=bound)
            exact = torch.nn.utils.get_total_norm(grads)
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
            if case.unvisited:
                assert all(not e.down_proj.grad[UNVISITED].any() for e in alone.experts(single))
            _update(optimizers[1], grads, 1)
            torch.testing.assert_close(weights, list(single.parameters()), rtol=0, atol=100 * bound)
    return first, list(chosen.notes), [len(pool.slots) for pool in chosen.pools]


def _gradients(case, hybrid, model, step):
    """Of two micro-batches; returns the loss."""
    alone = not isinstance(next(model.parameters()), DTensor)
    world = 1 if alone else dist.get_world_size()
    micros = [_micro(case, hybrid, 2 * step + number, alone) for number in range(2)]
    sums = torch.tensor([float(sum(micro["count"] for micro in micros)), 0.0]).double()
    if not alone:
        dist.all_reduce(sums)
    for number, micro in enumerate(micros):
        if not alone:
            set_last_micro_batch(model, number == 1, case.every)
        watched = case.counted and not alone
        with Recorder() if watched else nullcontext() as forward:
            loss = hybrid.loss(model, micro)
        with Recorder() if watched else nullcontext() as backward:
            (loss * world / sums[0].item()).backward()
        if watched:
            _check_calls(case, hybrid.shape, micro, forward, backward)
            _check_weights(case, hybrid.shape.moe_layers, forward, backward, number == 1)
        sums[1] += loss.item()
    if not alone:
        dist.all_reduce(sums)
        sums[0] /= world
    return (sums[1] / sums[0]).item()


def _micro(case, hybrid, number, alone):
    """This rank's part of a micro-batch, or all of it."""
    if case.sequence == 1:
        mix = MIXES[number % len(MIXES)]
        cuts = [0, *(min(cut, len(mix)) for cut in case.splits), len(mix)]
        whole, rank = batch_of(mix, number), dist.get_rank()
        return whole if alone else part_of(whole, cuts[rank], cuts[rank + 1])
    lengths = SHARED_MIXES[number % len(SHARED_MIXES)]
    samples = samples_of(lengths, number)
    if alone:
        return hybrid.collate([samples[n] for n in range(len(lengths))])
    group, groups = dist.get_rank() // case.sequence, dist.get_world_size() // case.sequence
    return hybrid.collate([Unread(samples)[n] for n in range(group, len(lengths), groups)])


def _check_calls(case, shape, micro, forward, backward):
    """In each layer one small exchange and two large ones, and two backwards, inside the block only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank - rank % case.experts
    block, layers = tuple(range(first, first + case.experts)), shape.moe_layers
    again = 3 * layers * (case.settings.get("activation_checkpointing", "none") != "none")
    visits = len(micro["tokens_T"]) * shape.active_experts
    there = sum(visits * (shape.hidden_size + 8) * 8 for _ in range(layers))  # fp64
    for log, number in ((forward, 3 * layers), (backward, 2 * layers + again)):
        calls = log.all_to_alls(block)
        assert len(calls) == len(log.all_to_alls()) == number, case
        assert {call.ranks for call in log.all_to_alls()} == {block}
    sizes, rows = forward.all_to_alls(block)[0::3], forward.all_to_alls(block)[1::3]
    assert all(call.numel == 2 * shape.num_experts for call in sizes)
    assert sum(sum(call.sends) for call in rows) == there
    back = torch.tensor(sum(sum(call.sends) for call in forward.all_to_alls(block)[2::3]))
    share = torch.tensor(there * shape.hidden_size // (shape.hidden_size + 8))
    for total in (back, share):
        dist.all_reduce(total)
    assert back == share
    assert world >= case.experts
    check_order([(c.name, c.ranks) for c in forward.calls + backward.calls])


def _check_weights(case, layers, forward, backward, last):
    """Experts are gathered once a pass, recomputed or not, and reduced over those that have them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    holders = tuple(range(rank % case.experts, world, case.experts))
    alone = len(holders) == 1  # nothing to gather
    for log in (forward, backward):
        gathers = [c for c in log.calls if "allgather" in c.name and c.ranks == holders]
        assert len(gathers) == (0 if alone else layers), (case, [c.name for c in log.calls])
    reductions = [c for c in backward.calls if "reduce_scatter" in c.name and c.ranks == holders]
    assert len(reductions) == (0 if alone or not (last or case.every) else layers)


def _update(optimizer, grads, world):
    clipped(grads, 1.0, world)
    optimizer.step()
    optimizer.zero_grad()


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _fail(error):
    raise error
