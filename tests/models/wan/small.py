"""A tiny video transformer, and the same written by hand."""

import math

import torch

from models.wan.build import build_wan, init_weights
from models.wan.config import WanConfig

SIZES = {
    "num_layers": 2, "num_heads": 2, "head_dim": 12, "intermediate_size": 40, "channels": 3,
    "text_size": 10, "time_size": 8, "max_positions": 16,
}  # fmt: skip


def shape(**changes):
    return WanConfig(**(SIZES | changes)).shape("high_noise")


def whole(seed=0, **changes):
    """With weights, none of which is 0."""
    model = build_wan(shape(**changes)).to_empty(device="cpu")
    torch.manual_seed(seed)
    for module in model.modules():
        init_weights(model, module)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "proj_out" in name:
                parameter.normal_(std=0.1)
    return model


def linear(state, name, x):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(x, scale=None, shift=None, eps=1e-6):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
    return x if scale is None else x * scale + shift


def rotated(x_THD, grid, D):
    """Pairs of neighbours turn by time, height and width: the head is divided among the three."""
    side = 2 * (D // 6)
    parts, at = (D - 2 * side, side, side), 0
    out = x_THD.clone()
    for axis, size in enumerate(parts):
        for pair in range(size // 2):
            angle = grid[:, axis].double() * 10000.0 ** (-2 * pair / size)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x_THD[..., at + 2 * pair], x_THD[..., at + 2 * pair + 1]
            out[..., at + 2 * pair] = a * cos - b * sin
            out[..., at + 2 * pair + 1] = a * sin + b * cos
        at += size
    return out


def attention(state, name, x_TM, context_UM, heads, grid):
    D = x_TM.shape[1] // heads
    q, k, v = (
        linear(state, f"{name}.to_{which}", source)
        for which, source in (("q", x_TM), ("k", context_UM), ("v", context_UM))
    )
    for which, values in (("q", q), ("k", k)):  # over all heads together
        scale = state[f"{name}.norm_{which}.weight"]
        values.copy_(values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale)
    q, k, v = (values.unflatten(1, (heads, D)) for values in (q, k, v))
    if grid is not None:
        q, k = rotated(q, grid, D), rotated(k, grid, D)
    weights = (torch.einsum("thd,uhd->htu", q, k) / math.sqrt(D)).softmax(-1)
    return linear(state, f"{name}.to_out.0", torch.einsum("htu,uhd->thd", weights, v).flatten(1))


@torch.no_grad()
def by_hand(model, latents_CFHW, time, words_SD):
    """The velocity of one video, in fp64, by loops and plain products."""
    state = {name: value.double() for name, value in model.state_dict().items()}
    config, heads = model.config, model.config.num_attention_heads
    C, F, H, W = latents_CFHW.shape
    patches = [(f, h, w) for f in range(F) for h in range(H // 2) for w in range(W // 2)]
    grid = torch.tensor(patches)
    kernel = state["patch_embedding.weight"].flatten(1)
    x_TM = torch.stack([
        kernel @ latents_CFHW[:, f, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].flatten() for f, h, w in patches
    ]) + state["patch_embedding.bias"]  # fmt: skip

    half = config.freq_dim // 2
    angles = time * torch.exp(-math.log(10000) * torch.arange(half).double() / half)
    sines = torch.cat([angles.cos(), angles.sin()])
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    embedder = "condition_embedder"
    temb = linear(state, f"{embedder}.time_embedder.linear_1", sines)
    temb = linear(state, f"{embedder}.time_embedder.linear_2", silu(temb))
    six_6M = linear(state, f"{embedder}.time_proj", silu(temb)).unflatten(0, (6, -1))
    words = linear(state, f"{embedder}.text_embedder.linear_1", words_SD)
    words = linear(state, f"{embedder}.text_embedder.linear_2", gelu(words, approximate="tanh"))

    for number in range(config.num_layers):
        name = f"blocks.{number}"
        shift, scale, gate, shift2, scale2, gate2 = state[f"{name}.scale_shift_table"][0] + six_6M
        seen = norm(x_TM) * (1 + scale) + shift
        x_TM = x_TM + gate * attention(state, f"{name}.attn1", seen, seen, heads, grid)
        seen = norm(x_TM, state[f"{name}.norm2.weight"], state[f"{name}.norm2.bias"])
        x_TM = x_TM + attention(state, f"{name}.attn2", seen, words, heads, None)
        seen = norm(x_TM) * (1 + scale2) + shift2
        inner = gelu(linear(state, f"{name}.ffn.net.0.proj", seen), approximate="tanh")
        x_TM = x_TM + gate2 * linear(state, f"{name}.ffn.net.2", inner)
    shift, scale = state["scale_shift_table"][0] + temb
    out_TP = linear(state, "proj_out", norm(x_TM) * (1 + scale) + shift)
    out = torch.zeros(C, F, H, W, dtype=torch.float64)
    for (f, h, w), values in zip(patches, out_TP, strict=True):  # the channel varies fastest
        out[:, f, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2] = values.unflatten(0, (2, 2, C)).permute(
            2, 0, 1
        )
    return out
