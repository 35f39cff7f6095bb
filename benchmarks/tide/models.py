"""What is trained: language models of the presets, and a video transformer of the shape of Wan 2.2."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from models.wan.build import build_wan
from models.wan.build import init_weights as init_video
from models.wan.config import WanConfig
from models.wan.flow import errors, times

PRESETS = Path(__file__).resolve().parent.parent.parent / "configs" / "model"
VIDEO = "wan22"
WORDS = 512
"""Vectors of text that a video is conditioned on."""


@dataclass(frozen=True)
class Workload:
    """A model on the meta device, and how to train it."""

    model: Any
    init: Callable[[nn.Module], None]
    """Initialises the direct parameters and buffers of one module."""
    draw: Callable[[int, int, torch.device], dict[str, Tensor]]
    """A new batch of so many samples of so many tokens each."""
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


def build(options: dict[str, Any]) -> Workload:
    """The workload that `options["model"]` names, with `options["changes"]`."""
    changes = options.get("changes", {})
    if options["model"] == VIDEO:
        return video(changes["num_layers"])
    values: Any = OmegaConf.load(PRESETS / f"{options['model']}.yaml")
    return language({**values, "attention": "sdpa", **changes})


def language(values: dict[str, Any]) -> Workload:
    """A causal language model on random tokens."""
    config = CausalLMConfig(**values)
    vocabulary = config.vocab_size or 257
    model = build_causal_lm(config, transformers_config(config, vocabulary))

    def draw(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
        return {"tokens": torch.randint(vocabulary, (batch, length), device=device)}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        logits = model(input_ids=tokens, use_cache=False).logits
        return next_token_loss(logits[:, :-1], tokens[:, 1:]) / (tokens.numel() - len(tokens))

    return Workload(model, partial(init_weights, model), draw, loss)


def video(num_layers: int) -> Workload:
    """Task `wan` on random latents of 64 x 64 places, of which four make a token: 1,024 a frame."""
    shape = WanConfig(num_layers=num_layers).shape("all")
    model = build_wan(shape)

    def draw(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
        frames = max(length // 1024, 1)
        latents = torch.randn(batch, shape["in_channels"], frames, 64, 64, device=device)
        words = torch.randn(batch, WORDS, shape["text_dim"], device=device, dtype=torch.bfloat16)
        uniform = torch.rand(batch, device=device)
        return {"latents": latents, "words": words, "uniform": uniform}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        time = times(batch["uniform"], "logit_normal", 5.0, 0.0, 1.0)
        return errors(model, latents, batch["words"], time, torch.randn_like(latents)).mean()

    return Workload(model, partial(init_video, model), draw, loss)
