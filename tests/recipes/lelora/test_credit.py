"""Credit adds up to what the loss fell by."""

import pytest
import torch

from recipes.lelora.credit import reliability
from recipes.lelora.meta import meta_batches, set_apart
from recipes.task import DataError
from tests.ranks import run_ranks
from tests.recipes.lelora.toys import Run, write_texts


def periods(folder, credit, lr):
    run = Run(folder, lr=lr, credit=credit, method="lelora", policy={"train": False})
    found = []
    for _ in range(7):
        run.advance(5)
        row = run.steering.journal.rows[-1]
        found.append((row["credit_gap"], row["reward"], sum(row["credit"]), row["loss"]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_simpsons_credit_is_the_drop(tmp_path, ranks):
    """At a learning rate that trains well; the pilot's alternative has the wrong sign there."""
    write_texts(tmp_path)
    found = run_ranks(ranks, periods, str(tmp_path), "simpson", 2e-2)[0]
    assert all(gap < 0.05 for gap, *_ in found), found
    assert found[-1][3] < found[0][3] - 0.05, "and there was something to fall"


def test_the_path_agrees_where_steps_are_small(tmp_path):
    """Of the training loss, on other samples than the meta loss: so it correlates, over periods."""
    write_texts(tmp_path)
    found = run_ranks(1, path_sums, str(tmp_path))[0]
    sums, drops = torch.tensor(found).T
    assert torch.corrcoef(torch.stack([sums, drops]))[0, 1] > 0.9
    assert ((sums - drops).abs() < 0.1 * drops.abs()).all()


def path_sums(folder):
    """The path's credit on one fixed batch, and what its loss fell by."""
    from recipes.lelora.credit import Parameters
    from recipes.lelora.path_credit import PathCredit

    run = Run(folder, lr=5e-4, method="frozen")
    parameters = Parameters(run.model, [t.adapter for t in run.task.adapted.targets])
    path = PathCredit(run.optimizer, parameters, max_norm=0.0)
    batch = run.task.collate([run.train_samples[n] for n in range(32)])
    found, lr = [], 5e-4
    for period in range(6):
        for group in run.optimizer.param_groups:
            group["lr"] = lr * (1 + period % 3)
        path.begin()
        begin = float(run.task.loss(run.model, batch).detach()) / 32
        for _ in range(11):
            (run.task.loss(run.model, batch) / 32).backward()
            run.optimizer.step()
            path.after_step(torch.tensor(1.0))
            run.optimizer.zero_grad()
            end = float(run.task.loss(run.model, batch).detach()) / 32
            before_last, begin_last = end, begin
        # the last step is looked at when the next one is made
        (run.task.loss(run.model, batch) / 32).backward()
        path._look()
        path.after_step(torch.tensor(1.0))
        run.optimizer.zero_grad()
        found.append((float(path.total_M.sum()), begin_last - before_last))
    return found


def test_halves_that_agree_are_reliable():
    a = torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    noise = torch.randn(200, generator=torch.Generator().manual_seed(1)).double()
    assert reliability(a, a) == pytest.approx(1.0)
    assert reliability(a, a + noise) == pytest.approx(0.83, abs=0.04)  # r = .71
    assert reliability(a, -a) == pytest.approx(-1.0)
    assert reliability(a, torch.zeros(200).double()) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_halves_are_the_same_on_any_number_of_ranks(ranks):
    samples = list(range(23))
    halves = [[], []]
    for rank in range(ranks):
        made = meta_batches(samples, 21, list, len, rank=rank, ranks=ranks, size=4)
        assert len({len(half) for half in made.halves}) <= 2
        for half, into in zip(made.halves, halves, strict=True):
            into += [sample for batch, counts in half if counts for sample in batch]
    assert [sorted(half) for half in halves] == [list(range(0, 21, 2)), list(range(1, 21, 2))]


def test_meta_samples_are_not_trained_on():
    train, meta = set_apart(list(range(50)), 0.1, seed=3)
    assert sorted(
        [train[n] for n in range(len(train))] + [meta[n] for n in range(len(meta))]
    ) == list(range(50))
    assert len(meta) == 5
    assert train.fingerprint() != set_apart(list(range(50)), 0.1, seed=4)[0].fingerprint()
    with pytest.raises(DataError, match=r"lelora.meta_share=0.9 of 3 samples leaves none"):
        set_apart([1, 2, 3], 0.9, seed=0)


def by_matrix(folder):
    """Inner products of one half's gradients with the weights, together and one by one."""
    from parallel.norm import copies
    from recipes.lelora.credit import Parameters
    from recipes.lelora.shards import local

    run = Run(folder, method="frozen")
    run.advance(2)
    names = [target.adapter for target in run.task.adapted.targets]
    parameters = Parameters(run.model, names)
    batch = run.task.collate([run.train_samples[n] for n in range(8)])
    run.task.loss(run.model, batch).backward()
    gradients, values = parameters.gradients(), parameters.values()
    gradients[1] = None
    gradients[3] = torch.full_like(gradients[3], torch.nan)
    found_M = parameters.dots(parameters.stacked(gradients), parameters.stacked(values))
    expected_M = torch.zeros(len(names) + 1, dtype=torch.float64)
    for (name, parameter), gradient in zip(parameters.named.items(), gradients, strict=True):
        owner = name.rpartition(".")[0]
        place = names.index(owner) if owner in names else len(names)
        if gradient is not None and gradient.numel():
            product = (gradient.double() * local(parameter.detach()).double()).sum()
            expected_M[place] += product / copies(parameter, run.ranks)
    return found_M.tolist(), expected_M.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_inner_products_of_all_parameters_are_each_matrixs_own(tmp_path, ranks):
    """What is not a number in one matrix stays there."""
    write_texts(tmp_path)
    for both in run_ranks(ranks, by_matrix, str(tmp_path)):
        found_M, expected_M = map(torch.tensor, both)
        assert expected_M.isnan().sum() == 1
        torch.testing.assert_close(found_M, expected_M, equal_nan=True)
