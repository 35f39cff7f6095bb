import random
from math import inf, nan

import pytest
import torch

from trainer.data import Step
from trainer.watch.interval import Outcome
from trainer.watch.spikes import ENOUGH, Spikes, Usual, in_words, origins


def run(figures, factor=10.0, each=5):
    """Rows about steps with these losses and norms, reported every so many steps."""
    spikes, rows = Spikes(factor), []
    for begin in range(0, len(figures), each):
        outcomes = []
        for number, (loss, norm) in enumerate(figures[begin : begin + each], start=begin + 1):
            samples, own = (lambda n=number: [n, -n]), (lambda n=number: [n])
            spikes.note(number, Step([], 2.0, 0.0, samples, own, False))
            tensors = map(torch.tensor, (loss, norm, 2 * loss))
            outcomes.append(Outcome(*tensors, own_count=2))
        rows += spikes.read(outcomes)
    return rows


def ordinary(steps, seed=0):
    chance = random.Random(seed)
    return [
        (4 - step / steps + chance.gauss(0, 0.1), chance.gauss(1, 0.1)) for step in range(steps)
    ]


def test_an_ordinary_run_has_none():
    assert run(ordinary(500)) == []
    assert run([(2.0, 1.0)] * 50 + [(2.001, 1.0)] * 50) == []  # after a standstill
    assert run([(9.0 - step / 20, 1.0) for step in range(100)]) == []


@pytest.mark.parametrize("which", ["loss", "grad_norm"])
def test_a_step_that_stands_out_is_named_with_its_batch(which):
    figures = ordinary(60)
    figures[42] = (9.0, 1.0) if which == "loss" else (3.6, 30.0)
    [row] = run(figures)
    assert (row["step"], row["samples"], row["rank"], row["rank_samples"]) == (
        43,
        [43, -43],
        0,
        [43],
    )
    assert row[which] == pytest.approx(9.0 if which == "loss" else 30.0)
    assert row["rank_loss"] == pytest.approx(row["loss"])
    assert 0.5 < row[f"usual_{which}"] < 5
    words = in_words(row)
    assert words.startswith("step 43 stands out: loss ")
    assert words.endswith("highest on rank 0: python -m trainer.inspect_data --sample 43")


def test_what_is_not_finite_stands_out_from_the_first_step_on_and_is_not_usual():
    figures = [(nan, nan), *ordinary(ENOUGH + 5), (inf, 1.0), *ordinary(5)]
    rows = run(figures)
    assert [row["step"] for row in rows] == [1, ENOUGH + 7]
    assert rows[0]["usual_loss"] is None
    assert "loss nan, norm nan;" in in_words(rows[0])
    usual = Usual()
    assert usual.stands_out(inf, 10)
    assert not usual.values


def test_without_a_factor_nothing_is_kept():
    assert run([(nan, nan)] * 5, factor=0) == []


def test_origins_are_those_that_the_task_knows():
    class Knows:
        def where(self, index):
            return iter([f"a.jsonl:{index}"])

    assert origins(Knows(), [3, 5, 7, 9, 11]) == {str(n): [f"a.jsonl:{n}"] for n in (3, 5, 7, 9)}
    assert origins(object(), [3]) == {}
