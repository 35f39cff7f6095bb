"""Rows have counts of steps of their own, and that costs little where none is needed."""

from functools import reduce

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.lelora.adapter import KINDS
from tests.models.lelora.toys import ALL_KINDS, Adapted, llama, tokens

LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8


class Counted(TorchDispatchMode):
    """Operators by name, views and the like left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.__name__.partition(".")[0])
        return operator(*args, **(kwargs or {}))


def aged(kind):
    """Adapters some of which have rows that came later, a step before the optimizer's next."""
    adapted, ids = Adapted(llama(), kind, lr=LR, betas=BETAS), tokens()
    adapted.switch_all([0, 1, 2])
    adapted.train(4, ids)
    first, second, third, *_ = adapted.targets
    adapted.switch(first.name, [1, 7])
    adapted.train(3, ids)
    adapted.switch(second.name, [8, 9, 5, 2])
    adapted.switch(third.name, [0, 2], 1.6)
    adapted.train(2, ids)
    adapted.optimizer.zero_grad()
    adapted.model(input_ids=ids, labels=ids).loss.backward()
    return adapted


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_row_is_moved_by_adam_with_the_count_of_its_own(kind):
    adapted = aged(kind)
    expected, young = {}, 0
    for target in adapted.targets:
        adapter = adapted.adapters[target.name]
        for name in KINDS[kind][0]:
            parameter = getattr(adapter, name)
            state = adapted.optimizer.state[parameter]
            age = adapter.age_R.double() + 1
            letters = name.rpartition("_")[2]
            shapes = [
                [-1 if n == axis else 1 for n in range(len(letters))]
                for axis, letter in enumerate(letters)
                if letter == "R"
            ]
            t = reduce(torch.minimum, [age.view(shape) for shape in shapes])
            live = (adapter.components_R >= 0).double()
            young += int((live * (age <= state["step"])).sum())
            gradient = parameter.grad.double()
            mean = BETAS[0] * state["exp_avg"].double() + (1 - BETAS[0]) * gradient
            square = BETAS[1] * state["exp_avg_sq"].double() + (1 - BETAS[1]) * gradient**2
            root = (square / (1 - BETAS[1] ** t)).sqrt() + EPS
            moved = LR * mean / (1 - BETAS[0] ** t) / root
            expected[parameter] = parameter.detach().double() - moved
    assert young > 0
    adapted.optimizer.step()
    for parameter, value in expected.items():
        torch.testing.assert_close(parameter.double(), value, atol=LR * 2e-3, rtol=0)


def test_rows_that_came_with_their_tensors_cost_one_operation():
    adapted, ids = Adapted(llama(), "dir_ab"), tokens()
    adapted.switch_all([0, 1, 2])
    adapted.train(2, ids)
    calls = adapted.row_steps
    with Counted() as counted:
        calls._begin(adapted.optimizer)
        calls._end(adapted.optimizer)
    assert len(counted.names) == 1 or set(counted.names) == {"add_"}, "of all adapters at once"


def test_the_host_waits_after_a_switch_only():
    adapted = aged("dir_ab")
    adapted.optimizer.step()
    calls = adapted.row_steps
    with Counted() as counted:
        calls._begin(adapted.optimizer)
        calls._end(adapted.optimizer)
    assert "lerp_" in " ".join(counted.names)
    assert not {"_local_scalar_dense", "nonzero", "equal"} & set(counted.names)
    younger = [t.name for t in adapted.targets if adapted.adapters[t.name].has_younger]
    assert younger == [t.name for t in adapted.targets[:2]], "the third only changed its scale"
