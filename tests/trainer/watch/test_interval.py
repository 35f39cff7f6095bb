from math import inf, isnan, nan

import pytest
import torch

from trainer.watch.clock import PHASES
from trainer.watch.goodput import first_start, productive_seconds
from trainer.watch.interval import PAUSES, Interval, Outcome, measured, summarize
from trainer.watch.peak import Memory


def outcome(loss, own, count):
    return Outcome(torch.tensor(loss), torch.tensor(1.0), torch.tensor(own), count)


def test_losses_are_means_over_labels_of_the_steps_that_have_one():
    interval = Interval(outcomes=[outcome(2.0, 6.0, 3), outcome(4.0, 30.0, 5)])
    assert interval.mean_loss() == 3.0
    assert interval.own_mean_loss() == 36 / 8
    interval.outcomes += [outcome(nan, inf, 4), outcome(nan, nan, 4), outcome(5.0, 0.0, 0)]
    assert interval.mean_loss() == pytest.approx(11 / 3)
    assert interval.own_mean_loss() == 36 / 8  # a rank without labels says nothing
    assert isnan(Interval(outcomes=[outcome(1.0, 0.0, 0)]).own_mean_loss())


def rank(own, forward, backward, memory):
    interval = Interval(outcomes=[outcome(1.0, own, 1)] * 2)
    interval.pauses["saving"] = 3.0
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": forward, "backward": backward}
    return measured(interval, phases, memory)


def test_a_row_is_about_all_ranks():
    row = summarize(
        [
            rank(2.0, 1.0, 2.0, Memory(10.0, 8.0, 3.0, 1, 0)),
            rank(5.0, 2.0, 7.0, Memory(11.0, 7.0, 4.0, 2, 1)),
            rank(nan, 1.0, 2.0, Memory(9.0, 7.5, 3.0, 0, 0)),
        ]
    )
    assert row.keys() == {
        "loss_max", *(f"{name}_seconds" for name in (*PHASES, *PAUSES)), "imbalance",
        "memory_gib", "memory_allocated_gib", "memory_symmetric_gib", "alloc_retries", "ooms",
    }  # fmt: skip
    assert row["loss_max"] == 5.0
    assert row["forward_seconds"] == pytest.approx(4 / 3 / 2)  # a step, and the mean
    assert row["saving_seconds"] == 1.5
    assert row["imbalance"] == pytest.approx(9 / 5)
    assert (row["memory_gib"], row["memory_allocated_gib"]) == (11.0, 8.0)
    assert row["memory_symmetric_gib"] == 4.0
    assert (row["alloc_retries"], row["ooms"]) == (3, 1)


def test_on_the_cpu_there_is_no_allocator_to_ask():
    row = summarize([rank(nan, 0.0, 0.0, Memory(1.0))])
    assert isnan(row["memory_allocated_gib"])
    assert isnan(row["loss_max"])
    assert isnan(row["imbalance"])


def train(step, seconds, skipped=0):
    return {"kind": "train", "step": step, "step_seconds": seconds, "skipped": skipped}


def test_only_steps_that_count_are_productive():
    rows = [
        train(7, 9.0),  # of a version that had no starts
        {"kind": "start", "step": 0, "started": 100.0, "skipped": 0},
        train(10, 1.0),
        {"kind": "eval", "step": 10, "loss": 1.0},
        train(15, 2.0),  # before a checkpoint
        {"kind": "start", "step": 15, "started": 200.0, "skipped": 0},
        train(20, 1.0, skipped=2),
    ]
    assert productive_seconds(rows) == 10 + 10 + 3
    elsewhere = {"kind": "start", "step": 1000, "started": 1.0, "skipped": 3}
    assert productive_seconds([elsewhere, train(1010, 1.0, skipped=3)]) == 10
    assert first_start(rows, now=500.0) == 100.0
    assert (productive_seconds([]), first_start([], now=500.0)) == (0.0, 500.0)
