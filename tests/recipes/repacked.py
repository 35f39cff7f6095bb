"""What ranks check of samples that a planner spreads over them: against one process, in fp64.

`check_mixes` and `check_steps` run on every rank; rank 0 holds the whole model and compares.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, SequenceConfig, build_mesh, mesh_shape
from parallel.norm import copies
from parallel.recompute import recompute
from parallel.repacking.config import RepackingConfig
from parallel.repacking.process_groups import make_groups
from parallel.repacking.ranks import PlannedRanks
from parallel.repacking.traffic import Traffic, split, traffic
from parallel.weights import materialize
from recipes.repacking import model_shape
from recipes.text.mixture import Mixture
from recipes.text.packing import Sequences
from recipes.text.planned import Unread
from recipes.text.store import TokenFile
from tests.recipes.test_hybrid import built, task
from tests.recorder import Recorder

MODES = {
    "wide": {"enabled": False},
    "repacked": {"parent_solver": False},
    "solver": {},
}  # fmt: skip
LENGTHS = (1, 1, 2, 3, 5, 9, 17, 40, 90)
HEADS = ((6, 2), (6, 1), (4, 2), (3, 1), (8, 4))
END = 256
SLOW_LINKS = str(Path(__file__).parent / "slow_links.json")


@dataclass(frozen=True)
class Mix:
    """Lengths of the documents of a micro-batch, and everything else that can be chosen."""

    lengths: list[int]
    mode: str
    heads: tuple[int, int]
    checkpointing: str = "none"
    node_size: int = 2
    max_parent: int = 32
    experts: int = 1
    settings: dict = field(default_factory=dict)
    counted: bool = True
    """Record every exchange, which takes longer than all else."""

    @property
    def repacking(self):
        first = {"rows_per_rank": 1, "calibration": SLOW_LINKS}
        return RepackingConfig(**(first | MODES[self.mode] | self.settings))


def random_mixes(count, seed, nodes=(2, 4), documents=13, **given):
    """All ways, heads and kinds of checkpointing in turn; lengths and settings by chance."""
    mixes = []
    for number in range(count):
        random = Random(f"{seed}/{number}")
        lengths = [random.choice(LENGTHS) for _ in range(random.randint(1, documents))]
        settings = {
            "baseline": random.choice(("homogeneous", "mixed")),
            "fit": random.choice(("time", "rows")),
            "rows_per_rank": random.choice((1, 1, 4, 20)),
        }
        mixes.append(
            Mix(
                lengths, list(MODES)[number % 3], HEADS[number % len(HEADS)],
                ("none", "block", "none", "selective")[number // 3 % 4], settings=settings,
                node_size=random.choice(nodes), **given,
            )
        )  # fmt: skip
    return mixes


def wide_mixes(numbers):
    """Parents of 16 and 32 ranks, and nodes of four and eight; the parent solver may make them narrower.

    The first six are each of the modes at each width.
    """
    mixes = []
    for number in numbers:
        random, P = Random(f"wide/{number}"), (16, 32)[number % 2]
        lengths = [90, *(random.choice(LENGTHS) for _ in range(random.randint(2, 30)))]
        mixes.append(
            Mix(
                lengths, list(MODES)[number // 2 % 3], ((32, 4), (6, 2), (12, 1))[number % 3],
                ("none", "block")[number in (1, 4, 8)], (8, 4)[number % 5 == 0], P,
                settings={"several_widths": number % 4 != 1}, counted=number in (0, 3, 4, 7, 9),
            )
        )  # fmt: skip
    return mixes


def samples_of(lengths, seed=0):
    """Documents of random bytes, each a sample; every fourth token is no label."""
    rng, starts = np.random.default_rng(seed), np.cumsum([0, *lengths])
    tokens = rng.integers(0, 256, int(starts[-1]))
    learnt = rng.random(len(tokens)) > 0.25
    file = TokenFile(tokens, starts, len(tokens), learnt=learnt)
    source = Sequences(file, max(lengths), END, None, packing="none")
    return Mixture([source], [len(source)])


def ranks_of(mix, groups):
    return PlannedRanks(
        size=dist.get_world_size(), rank=dist.get_rank(), node_size=mix.node_size,
        max_parent=mix.max_parent, config=mix.repacking, recompute=mix.checkpointing != "none",
        dtype_bytes=8, groups=groups,
    )  # fmt: skip


def model_of(mix):
    H, K = mix.heads
    return task(
        model={"num_heads": H, "num_kv_heads": K, "num_experts": 8 if mix.experts > 1 else 6}
    )


def as_one_process():
    """The loss asks nobody else for their visits."""
    return patch("recipes.balance.sum_over_ranks", lambda values: values)


def reference(mix, samples):
    """Loss and gradients of one process, end to end."""
    alone = model_of(mix)
    model = built(alone).double()
    batch = alone.collate([samples[i] for i in range(len(samples))])
    with as_one_process():
        loss = alone.loss(model, batch)
    loss.backward()
    return loss.detach(), batch["count"], torch.cat([p.grad.flatten() for p in model.parameters()])


def check_mixes(mixes):
    """Losses, gradients, exchanges and their bytes. Returns how each mix's parents were treated."""
    groups, rank, found = make_groups(dist.get_world_size(), "cpu"), dist.get_rank(), []
    for mix in mixes:
        ours, ranks = model_of(mix), ranks_of(mix, groups)
        ours.plan_samples(ranks)
        model = built(ours).double()
        for layer in model.model.layers:
            recompute(layer, mix.checkpointing)
        samples = Unread(samples_of(mix.lengths))
        batch = ours.collate([samples[i] for i in range(len(samples))])
        with Recorder() if mix.counted else nullcontext() as forward:
            loss = ours.loss(model, batch)
        with Recorder() if mix.counted else nullcontext() as backward:
            loss.backward()
        if mix.counted:
            check_calls(mix, ours, batch["plan"], ranks, forward, backward)
        grads = [p.grad.flatten() for p in model.parameters()]  # of every parameter, on every rank
        count = torch.tensor([float(batch["count"])], dtype=torch.float64)
        total = torch.cat([loss.detach().reshape(1), count, *grads])
        dist.all_reduce(total)
        if rank == 0:
            expected, labels, gradient = reference(mix, samples.samples)
            torch.testing.assert_close(total[0], expected, rtol=1e-12, atol=1e-12)
            assert total[1].item() == labels
            torch.testing.assert_close(total[2:], gradient, rtol=0, atol=1e-10, msg=str(mix))
        found.append([(p.width, len(p.children), p.fallback) for p in batch["plan"].parents])
    return found


def check_calls(mix, ours, plan, ranks, forward, backward):
    """Two exchanges a layer and pass, over nodes only where they must, as long as they should be."""
    rank, shape = dist.get_rank(), model_shape(ours.shape, ranks)
    parent, child = plan.parent_of(rank), plan.child_of(rank)
    wide, own = (tuple(range(b.first_rank, b.first_rank + b.width)) for b in (parent, child))
    calls = {wide: 0, own: 0}
    for group, layers in ((wide, shape.full_layers), (own, shape.sparse_layers)):
        calls[group] += 2 * layers if len(group) > 1 else 0
    passes = 1 + ranks.recompute
    for log, times in ((forward, 1), (backward, passes)):
        for group, number in calls.items():
            assert len(log.all_to_alls(group)) == times * number, (mix, group)
        assert len(log.all_to_alls()) == times * sum(calls[group] for group in {wide, own})
        across = [c for c in log.all_to_alls() if len({r // mix.node_size for r in c.ranks}) > 1]
        assert parent.fallback or {c.ranks for c in across} <= {wide}
        sent = sum(
            (sent_by(call, rank, mix.node_size) for call in log.all_to_alls()), Traffic(0, 0)
        )
        total = torch.tensor([sent.inside, sent.across], dtype=torch.float64)
        dist.all_reduce(total)
        expected = traffic(plan, shape).times(times)
        assert total.tolist() == [expected.inside, expected.across], mix
    check_order([(c.name, c.ranks) for c in forward.calls + backward.calls])


def sent_by(call, rank, node_size):
    """One rank's part of a call, by where it goes."""
    table = np.zeros((len(call.ranks), len(call.ranks)))
    table[call.ranks.index(rank)] = call.sends
    return split(table, call.ranks[0], node_size)


def check_order(calls):
    """Any two ranks meet in the same collectives, in the same order."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, calls)
    if dist.get_rank() == 0:
        for a, b in combinations(range(len(everyone)), 2):
            ours, theirs = (
                [call for call in everyone[rank] if {a, b} <= set(call[1])] for rank in (a, b)
            )
            assert ours == theirs, (a, b)


def check_steps(mixes, steps=5):
    """Weights after steps of AdamW under FSDP2, of two micro-batches each, clipped; and losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = make_groups(world, "cpu")
    for mix in mixes:
        ours, alone = model_of(mix), model_of(mix)
        ours.plan_samples(ranks_of(mix, groups))
        config = ParallelConfig(
            sequence=SequenceConfig(max_parent=mix.max_parent), repacking=mix.repacking,
            activation_checkpointing=mix.checkpointing, experts=mix.experts,
        )  # fmt: skip
        config.reduce_dtype = "float64"  # not for users: so that all is exact
        sharded = ours.build_model().double()
        experts = ours.experts(sharded)
        parallelize(sharded, build_mesh(mesh_shape(config, world), "cpu"), config, experts)
        materialize(sharded, torch.device("cpu"), ours.init_weights, seed=1)
        single = alone.build_model().double()
        materialize(single, torch.device("cpu"), alone.init_weights, seed=1)
        got = [train(ours, sharded, mix, step, world) for step in range(steps)]
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in sharded.parameters()]
        if rank == 0:
            with as_one_process():
                expected = [train(alone, single, mix, step, 1) for step in range(steps)]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
            assert expected[-1][0] != expected[0][0]
            for mine, theirs in zip(weights, single.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    return len(mixes)


def train(ours, model, mix, step, world):
    """One step; returns its loss and the norm of its gradient, over all ranks."""
    if step == 0:
        model.optimizer = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    (optimizer,), random = model.optimizer, Random(step)
    samples, batches = samples_of([random.choice(LENGTHS) for _ in range(9)], step), []
    if world > 1:
        samples = Unread(samples)
    for part in (range(3), range(3, 9)):
        batches.append(ours.collate([samples[i] for i in part]))
    sums = torch.tensor([float(b["count"]) for b in batches], dtype=torch.float64).sum().reshape(1)
    if world > 1:
        dist.all_reduce(sums)
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(batches):
        if world > 1:
            set_last_micro_batch(model, last=number == 1, every=False)
        loss = ours.loss(model, batch)
        (loss * world / sums.item()).backward()
        total += loss.detach()
    if world > 1:
        dist.all_reduce(total)
    norm = clipped([p.grad for p in model.parameters()], 1.0, world)
    optimizer.step()
    optimizer.zero_grad()
    return total.item() / sums.item(), norm


def clipped(grads, max_norm, world):
    """Scales gradients to a norm of at most `max_norm`; returns the norm. In fp64, on any meshes."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    squares = sum(
        part.square().sum() / copies(grad, world) for part, grad in zip(local, grads, strict=True)
    )
    if world > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().item()
    for part in local:
        part.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm
