"""Times, noise, and the loss against the transformer and the flow written out in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.wan.flow import STEPS, cumulative, draws, errors, times

SHIFTS = st.floats(0.2, 20)
DENSITY = st.sampled_from(["logit_normal", "uniform"])


def shifted(time, shift):
    return shift * time / (1 + (shift - 1) * time)


@settings(deadline=None, max_examples=40)
@given(SHIFTS, DENSITY, st.sampled_from([(0.0, 1.0), (0.875, 1.0), (0.0, 0.9)]))
def test_times_are_those_of_the_distribution_on_the_experts_part(shift, density, part):
    """Against drawing from all times, shifting as the formula says, and keeping the part's."""
    low, high = part
    even = (torch.arange(4001, dtype=torch.float64) + 0.5) / 4001
    found = times(even, density, shift, low, high)
    assert found.dtype == torch.int64
    assert found.min() >= max(low * STEPS, 1)
    assert found.max() <= high * STEPS - (high < 1) * 1
    before = torch.special.ndtri(even).sigmoid() if density == "logit_normal" else even
    every = shifted(before, shift)
    kept = every[(every >= low) & (every <= high)]
    if len(kept) > 200:
        quantiles = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
        torch.testing.assert_close(
            found.double().quantile(quantiles) / STEPS, kept.quantile(quantiles), rtol=0, atol=0.01
        )


@settings(deadline=None, max_examples=30)
@given(SHIFTS, st.floats(0.01, 0.99))
def test_the_shift_moves_the_cumulative_function(shift, time):
    assert cumulative(shifted(time, shift), "uniform", shift) == pytest.approx(time)
    normal = 0.5 * (1 + math.erf(math.log(time / (1 - time)) / math.sqrt(2)))
    assert cumulative(shifted(time, shift), "logit_normal", shift) == pytest.approx(normal)
    assert cumulative(0.0, "uniform", shift) == 0
    assert cumulative(1.0, "uniform", shift) == 1


@pytest.mark.parametrize("density", ["logit_normal", "uniform"])
def test_extreme_numbers_give_times_inside(density):
    """0 is what a generator may give, and the low-noise expert begins at no noise at all."""
    for part in ((0.0, 1.0), (0.0, 0.875), (0.875, 1.0)):
        found = times(torch.tensor([0.0, 1 - 2**-24]), density, 5.0, *part)
        assert ((found >= max(1, part[0] * STEPS)) & (found < STEPS)).all()


def test_a_video_has_its_noise_whatever_is_beside_it():
    device = torch.device("cpu")
    uniform, noise = draws([3, 4, 5], (2, 3), device)
    for place, seed in enumerate([3, 4, 5]):
        alone = draws([seed], (2, 3), device)
        assert torch.equal(alone[0][0], uniform[place])
        assert torch.equal(alone[1][0], noise[place])
    assert len(set(uniform.tolist())) == 3


def test_the_loss_is_what_fp64_by_hand_gives():
    """Of two videos at two times; the transformer keeps norms in fp32."""
    pytest.importorskip("diffusers")
    from tests.models.wan.small import by_hand, whole

    model = whole()
    torch.manual_seed(1)
    latents, noise = torch.randn(2, 2, 3, 2, 4, 6).double()
    words = torch.randn(2, 5, 10)
    time = torch.tensor([901, 412])
    found = errors(model, latents.float(), words, time, noise.float())
    expected = []
    for number in range(2):
        t = time[number].item() / 1000
        mixed = (1 - t) * latents[number] + t * noise[number]
        velocity = by_hand(model, mixed, time[number].item(), words[number].double())
        expected.append((velocity - (noise[number] - latents[number])).square().mean())
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=2e-5, atol=0)
    assert not math.isclose(expected[0], expected[1], rel_tol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_loss_in_bf16_is_near_by_hand_on_a_gpu():
    pytest.importorskip("diffusers")
    from tests.models.wan.small import by_hand, whole

    model, device = whole(), torch.device("cuda")
    _, noise = draws([1, 2], (3, 2, 4, 6), device)
    latents, words = torch.randn(2, 3, 2, 4, 6, device=device), torch.randn(2, 5, 10, device=device)
    time = times(torch.tensor([0.3, 0.9], device=device), "logit_normal", 5.0, 0.0, 1.0)
    found = errors(model.to(device, torch.bfloat16), latents, words, time, noise)
    expected = []
    for number, t in enumerate(time.tolist()):
        x, e, w = (v[number].double().cpu() for v in (latents, noise, words))
        velocity = by_hand(model.cpu().float(), (1 - t / 1000) * x + t / 1000 * e, t, w)
        expected.append((velocity - (e - x)).square().mean())
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=0.03, atol=0)
