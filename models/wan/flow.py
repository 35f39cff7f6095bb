"""Flow matching: the model learns the velocity from a video to noise, at some time between them.

    x_t = (1 - t) x_0 + t x_1      x_0: the video's latents, x_1: normal noise, t in (0, 1)
    the model is shown x_t and t, and learns v = x_1 - x_0

That is rectified flow (Liu et al. 2022, "Flow Straight and Fast"), by which Wan is trained (Wan Team
2025, "Wan: Open and Advanced Large-Scale Video Generative Models"), with t from a logit-normal
distribution (Esser et al. 2024, "Scaling Rectified Flow Transformers", section 3.1).

Large videos need more noise until nothing of them is left, so times are *shifted* to the noisy end, in
training as in sampling: t' = s t / (1 + (s - 1) t) (Esser et al., section 5.3.2). On the logit of t
that only adds log(s).

Wan 2.2 has two experts, which share the range of times: one above a boundary, one below. A time of one
expert's is drawn from the distribution on its part of the range, by the inverse of its cumulative
function, so that none is drawn in vain.

The model is told whole numbers of thousandths. So it is when videos are sampled, and a half-precision
copy of a time, which FSDP2 would make of a fraction, would be off by up to two of them.

Legend: B videos, C channels, F frames, H and W places of a frame, all of latents; S vectors of text.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STEPS = 1000
"""Of the range of times, as the model counts it."""
DENSITIES = ("logit_normal", "uniform")


def cumulative(time: float, density: str, shift: float) -> float:
    """How likely a shifted time is below `time`."""
    if time <= 0 or time >= 1:
        return float(time >= 1)
    logit = math.log(time / (1 - time)) - math.log(shift)
    if density == "logit_normal":
        return 0.5 * (1 + math.erf(logit / math.sqrt(2)))
    return 1 / (1 + math.exp(-logit))


def times(uniform_B: Tensor, density: str, shift: float, low: float, high: float) -> Tensor:
    """Times (B,) in [low, high] out of numbers that are uniform in [0, 1): whole, of `STEPS`, int64."""
    begin, end = (cumulative(time, density, shift) for time in (low, high))
    part_B = begin + (end - begin) * uniform_B.double()
    logit_B = torch.special.ndtri(part_B) if density == "logit_normal" else torch.logit(part_B)
    exact_B = (STEPS * torch.sigmoid(logit_B + math.log(shift))).round()
    first, last = math.ceil(low * STEPS), math.ceil(high * STEPS) - 1
    return exact_B.clamp(max(first, 1), last).long()


def draws(
    seeds: Sequence[int], shape: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each seed, and by it alone, a number in [0, 1) and normal noise: (B,) and (B, *shape)."""
    if device.type == "meta":  # a plan
        return torch.empty(len(seeds), device=device), torch.empty(
            len(seeds), *shape, device=device
        )
    uniform, noise = [], []
    for seed in seeds:
        generator = torch.Generator(device).manual_seed(seed)
        uniform.append(torch.rand((), generator=generator, device=device))
        noise.append(torch.randn(tuple(shape), generator=generator, device=device))
    return torch.stack(uniform), torch.stack(noise)


def errors(
    model: Any, latents_BCFHW: Tensor, words_BSD: Tensor, time_B: Tensor, noise_BCFHW: Tensor
) -> Tensor:
    """Mean squared error of the velocity of each video, (B,); times as `times` gives them."""
    wide = (-1, 1, 1, 1, 1)
    latents_BCFHW = latents_BCFHW.to(noise_BCFHW.dtype)
    t_B1111 = (time_B / STEPS).to(noise_BCFHW.dtype).view(wide)
    mixed_BCFHW = (1 - t_B1111) * latents_BCFHW + t_B1111 * noise_BCFHW
    kind = model.patch_embedding.weight.dtype
    found_BCFHW = model(
        hidden_states=mixed_BCFHW.to(kind),
        timestep=time_B,
        encoder_hidden_states=words_BSD.to(kind),
        return_dict=False,
    )[0]
    wanted_BCFHW = noise_BCFHW - latents_BCFHW
    error: Tensor = (found_BCFHW.to(noise_BCFHW.dtype) - wanted_BCFHW).square().flatten(1).mean(1)
    return error
