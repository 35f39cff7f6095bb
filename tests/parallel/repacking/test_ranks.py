"""Plans across ranks and worker processes."""

import dataclasses

import numpy as np
import pytest
import torch.distributed as dist

from parallel.repacking.agree import broadcast_plan, check_same
from parallel.repacking.ahead import PlannedSteps, plans_ahead
from tests.parallel.repacking.cases import planner
from tests.ranks import run_ranks

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 30_000, 60)
STEPS = [list(range(k, 60, 4)) for k in range(4)]


def check_ranks():
    rank, how = dist.get_rank(), planner()
    order = np.random.default_rng(rank).permutation(60)
    plan = how.plan(LENGTHS[order], order)
    check_same(plan)
    other = how.plan(LENGTHS[:59]) if rank == 2 else plan
    with pytest.raises(ValueError, match=r"ranks \[2\] of the group have another plan"):
        check_same(other)
    # By the clock: rank 1 plans, and the others take what it sends.
    clocked = dataclasses.replace(how, config=dataclasses.replace(how.config, search_seconds=0.02))
    sent = broadcast_plan(clocked.plan(LENGTHS) if rank == 1 else None, source=1)
    check_same(sent)
    return plan.digest, sent.to_json()


def test_ranks_agree():
    results = run_ranks(3, check_ranks)
    assert len(set(results)) == 1


def test_data_workers_plan_ahead():
    """In another process, in order, the same plans; ids are those of the dataset."""
    steps = PlannedSteps(planner(), LENGTHS, STEPS)
    here = [plan.digest for plan in plans_ahead(steps, 0)]
    ahead = plans_ahead(steps, 2, multiprocessing_context="forkserver")
    plans = list(ahead)
    assert [plan.digest for plan in plans] == here
    assert plans[1].ids.tolist() == STEPS[1]
    assert plans[1].lengths.tolist() == LENGTHS[STEPS[1]].tolist()
