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

PRESETS = Path(__file__).resolve().parent.parent.parent / "configs" / "model"
VIDEO = "wan22"
WAN22: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip
"""Of one of the two experts of Wan2.2-A14B, by its published configuration; it has 40 layers."""
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
    """Flow matching on random latents: the model learns the way from noise to the video.

    A latent has 64 x 64 places, four of which make a token: 1,024 tokens a frame.
    """
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=num_layers, **WAN22)

    def draw(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
        frames = max(length // 1024, 1)
        latents = torch.randn(batch, 16, frames, 64, 64, device=device)
        words = torch.randn(batch, WORDS, WAN22["text_dim"], device=device, dtype=torch.bfloat16)
        times = torch.rand(batch, device=device)
        return {"latents": latents, "words": words, "times": times}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        latents, times = batch["latents"], batch["times"].view(-1, 1, 1, 1, 1)
        noise = torch.randn_like(latents)
        mixed = torch.lerp(latents, noise, times).bfloat16()
        found = model(
            hidden_states=mixed, timestep=1000 * batch["times"],
            encoder_hidden_states=batch["words"], return_dict=False,
        )[0]  # fmt: skip
        return nn.functional.mse_loss(found.float(), noise - latents)

    return Workload(model, _init_video, draw, loss)


@torch.no_grad()
def _init_video(module: Any) -> None:
    """As torch initialises; tables are small numbers, and rotations are worked out again."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif any(True for _ in module.buffers(recurse=False)):
        fresh = type(module)(module.attention_head_dim, module.patch_size, module.max_seq_len)
        for name, buffer in module.named_buffers(recurse=False):
            buffer.copy_(getattr(fresh, name))
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
