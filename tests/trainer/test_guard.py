import pytest
import torch

from trainer.errors import NonFiniteError
from trainer.guard import Guard
from trainer.optim import OptimConfig, build_optimizer


def make():
    parameter = torch.nn.Parameter(torch.ones(3))
    return parameter, build_optimizer([parameter], OptimConfig(lr=0.1))


def step(guard, parameter, optimizer, grad, number, loss=1.0):
    parameter.grad = torch.full((3,), grad)
    norm = parameter.grad.norm()
    guard.skip_unless_finite(optimizer, torch.tensor(loss), norm, number, lambda: [number * 2, 7])
    optimizer.step()


@pytest.mark.parametrize(("loss", "grad"), [(1.0, float("nan")), (float("inf"), 1.0)])
def test_a_skipped_step_leaves_no_trace(loss, grad):
    """Weights, moments and the step counter are those of a run that never saw the batch."""
    parameter, optimizer = make()
    twin, twin_optimizer = make()
    guard, twin_guard = Guard(limit=3), Guard(limit=3)
    for number, (g, value) in enumerate([(1.0, 1.0), (grad, loss), (0.5, 1.0)], start=1):
        step(guard, parameter, optimizer, g, number, value)
        if number != 2:
            step(twin_guard, twin, twin_optimizer, g, number)
    guard.read()
    assert guard.skipped == 1
    assert guard.in_a_row == 0
    assert torch.equal(parameter, twin)
    state, expected = optimizer.state[parameter], twin_optimizer.state[twin]
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_the_limit_ends_the_run_with_the_batch_named():
    parameter, optimizer = make()
    guard = Guard(limit=2)
    for number in (1, 2):
        step(guard, parameter, optimizer, float("inf"), number)
    with pytest.raises(NonFiniteError, match=r"2 steps in a row, last at step 2 \(samples 4, 7\)"):
        guard.read()


def test_steps_in_between_that_are_fine_reset_the_count():
    parameter, optimizer = make()
    guard = Guard(limit=2)
    for number, grad in enumerate([float("nan"), 1.0] * 3, start=1):
        step(guard, parameter, optimizer, grad, number)
    guard.read()
    assert guard.skipped == 3
