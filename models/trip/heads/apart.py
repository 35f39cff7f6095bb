"""A look of the target's at each kind of key, instead of one at all of them together.

B histories, K keys of a kind, D hidden size, F findings: one for each kind, and the target's own state

In one softmax kinds compete: what the layers and summaries add is paid for with attention to the items.
Side by side, each is there in full, and the head over plain embeddings is contained in the model: it is
what is left where the last layers read no other finding, or where the target gives the items all of
its shares.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.heads.target import Look
from models.trip.heads.verdict import Verdict


class ApartHead(nn.Module):
    """The verdict on all findings, side by side, or (`model.read=gated`) mixed by the target."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.kinds = config.keys_used
        self.looks = nn.ModuleList(Look(config) for _ in self.kinds)
        self.target_norm = nn.LayerNorm(D)
        self.told_norm = nn.LayerNorm(D) if config.summaries else None
        findings = len(self.looks) + (self.told_norm is not None)
        self.gate = nn.Linear(D, findings) if config.read == "gated" else None
        self.verdict = Verdict(config, 1 if self.gate is not None else findings)

    def forward(
        self, keys: Mapping[str, tuple[Tensor, Tensor]], target_BD: Tensor, told_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-odds (B,) and the weights of all keys, which add to one at most.

        `keys`: of each kind (B, K, D), and which are there (B, K). `told_BD`: the target's state above
        the summaries, which asks them; the target itself asks the others.
        """
        target_BD, findings, weights = self.target_norm(target_BD), [], []
        told_BD = target_BD if self.told_norm is None else self.told_norm(told_BD)
        for kind, look in zip(self.kinds, self.looks, strict=True):
            asks_BD = told_BD if kind == "summaries" else target_BD
            seen_BD, weights_BK = look(*keys[kind], asks_BD)
            findings.append(seen_BD)
            weights.append(weights_BK)
        if self.told_norm is not None:
            findings.append(told_BD)
        if self.gate is None:
            weights_BK = torch.cat(weights, dim=1) / len(weights)
            return self.verdict(torch.cat(findings, dim=1), target_BD), weights_BK
        shares_BF = self.gate(target_BD).softmax(1)
        seen_BD = (torch.stack(findings, dim=1) * shares_BF[..., None]).sum(1)
        parts = [w_BK * shares_BF[:, f, None] for f, w_BK in enumerate(weights)]
        return self.verdict(seen_BD, target_BD), torch.cat(parts, dim=1)
