"""The probe is the best classifier of its kind, and better on new samples than none."""

import torch

from models.linear_probe import DECAYS, fit_probe


def clusters(number, seed, spread=1.0):
    """Samples around three points, far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (number,), generator=generator)
    centres = torch.tensor([[9.0, 5.0, 5.0], [5.0, 9.0, 5.0], [5.0, 5.0, 9.0]])
    return centres[labels] + spread * torch.randn(number, 3, generator=generator), labels


def test_the_gradient_of_what_it_minimises_is_zero_at_one_of_the_decays():
    x, labels = clusters(200, 0, spread=2.0)
    probe = fit_probe(x, labels, 3)
    weight, bias = (t.double().requires_grad_() for t in probe)
    loss = type(probe)(weight, bias).loss(x.double(), labels)
    by_weight, by_bias = torch.autograd.grad(loss, [weight, bias])
    assert by_bias.abs().max() < 1e-4
    variance = x.var(0, unbiased=False).mean()
    residual = min(float((by_weight + d * variance * weight).detach().abs().max()) for d in DECAYS)
    assert residual < 1e-4
    assert by_weight.abs().max() > residual


def test_new_samples_are_told_apart_and_a_label_without_samples_is_improbable():
    probe = fit_probe(*clusters(200, 0), 4)
    x, labels = clusters(200, 1)
    logits = x @ probe.weight_CD.T + probe.bias_C
    assert (logits.argmax(1) == labels).double().mean() > 0.97
    assert logits.softmax(1)[:, 3].max() < 0.05
    assert logits.dtype == torch.float32


def test_a_few_samples_are_enough_to_begin():
    probe = fit_probe(*clusters(2, 0), 3)
    assert all(torch.isfinite(part).all() for part in probe)
