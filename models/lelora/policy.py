"""The policy network: all matrices of a model at once, and an action's logits for each.

    M matrices, F features, D hidden, W widths, S starts, C scales

Matrices are tokens without an order, so the network is the same for any model. Before it has learnt
anything it says the same of every matrix, whatever the features: the last layers begin at zero, with a
bias of `models.lelora.actions.warm_logits`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.lelora.actions import Logits, Space, masked
from models.lelora.features import NUM_FEATURES

HEADS = 4
NETS = ("transformer", "mlp")


class Verdict(NamedTuple):
    """What the network gives."""

    logits: Logits
    value: Tensor
    """The reward that it expects, a scalar."""


class Policy(nn.Module):
    """Features of all matrices to logits of their actions. Lives on the CPU, in fp32."""

    def __init__(self, space: Space, warm: Logits, net: str, dim: int, layers: int) -> None:
        super().__init__()
        self.space = space
        W, S, C = len(space.widths), space.starts, len(space.scales)
        self.inlet = nn.Linear(NUM_FEATURES, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, HEADS, 2 * dim, 0.0, batch_first=True, norm_first=True)
            if net == "transformer"
            else Pooled(dim)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.hold, self.width = nn.Linear(dim, 1), nn.Linear(dim, W)
        self.start, self.scale = nn.Linear(dim, W * S), nn.Linear(dim, C)
        self.value = nn.Linear(dim, 1)
        with torch.no_grad():
            for head in (self.hold, self.width, self.start, self.scale, self.value):
                head.weight.zero_()
                head.bias.zero_()
            self.hold.bias.copy_(warm.hold_M)
            self.width.bias.copy_(warm.width_MW[0])
            self.start.bias.copy_(warm.start_MWS[0].flatten())
            self.scale.bias.copy_(warm.scale_MC[0])

    def forward(self, features_MF: Tensor, allowed_MW: Tensor) -> Verdict:
        """`allowed_MW` says which widths a matrix can have."""
        x_MD = torch.tanh(self.inlet(features_MF))
        for block in self.blocks:
            x_MD = block(x_MD[None])[0]
        x_MD = self.norm(x_MD)
        start_MWS = self.start(x_MD).view(len(x_MD), len(self.space.widths), self.space.starts)
        logits = Logits(self.hold(x_MD)[:, 0], self.width(x_MD), start_MWS, self.scale(x_MD))
        return Verdict(masked(logits, allowed_MW), self.value(x_MD.mean(0))[0])


class Pooled(nn.Module):
    """A layer without attention: each matrix sees itself and the mean of all."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x_1MD: Tensor) -> Tensor:
        """Adds to what it gets."""
        h = self.norm(x_1MD)
        h = torch.cat([h, h.mean(1, keepdim=True).expand_as(h)], -1)
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(h)))
        return x_1MD + out


def build_policy(space: Space, warm: Logits, net: str, dim: int, layers: int, seed: int) -> Policy:
    """A policy whose weights follow from `seed`; the random state around it is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(space, warm, net, dim, layers)


def save_policy(path: Path, policy: Policy, settings: dict[str, Any]) -> None:
    """Write a policy that other runs can begin with; `settings` say what it was trained on."""
    metadata = {"space": json.dumps(_choices(policy.space)), "settings": json.dumps(settings)}
    save_file({n: p.detach() for n, p in policy.state_dict().items()}, path, metadata)


def load_policy(path: Path, policy: Policy) -> dict[str, Any]:
    """Fill `policy` from a file; returns its settings. Raises `ValueError` if it is of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata, weights = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        choices, settings = json.loads(metadata["space"]), json.loads(metadata["settings"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"lelora.policy.path={path} is no policy that can be read ({type(error).__name__}): set "
            "lelora.policy.path to a file that lelora.population has written, or to null"
        ) from error
    own = _choices(policy.space)
    if choices != own:
        raise ValueError(
            f"lelora.policy.path={path} chooses among {choices}, and here it is {own}: set "
            "lelora.widths, lelora.scales and lelora.actions as they were there"
        )
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"lelora.policy.path={path} has another network: set lelora.policy.net, dim and layers as "
            "they were there"
        ) from error
    return dict(settings)


def _choices(space: Space) -> dict[str, Any]:
    return {"widths": list(space.widths), "scales": list(space.scales), "windows": space.windows}
