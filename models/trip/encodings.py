"""What is added to an item for its place in the history, and for its time before the target.

    B histories, N items, D hidden size, K factors, C coarse and F fine time buckets

The place is counted from the newest item, and histories are padded on the left: item `n` of N has
place `N - 1 - n` in every row of a batch.
"""

import math

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig


class FactorizedRankEncoding(nn.Module):
    """A table of places as a product: `max_history * K + K * D` numbers instead of `max_history * D`.

    It starts as the best product of that rank for a sinusoidal table (its truncated singular value
    decomposition), so that near places begin near each other, small or large; or at random. With a
    gate, the target weighs the K factors: by one at the start, by anything from zero to two later.
    """

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        N, D = config.max_history, config.hidden_size
        K = min(config.rank_factors, N)
        self.random = config.rank_start == "random"
        self.wave_size = wave_size(config)
        self.places_NK = nn.Parameter(torch.empty(N, K))
        self.directions_KD = nn.Parameter(torch.empty(K, D))
        self.gate_KD = nn.Parameter(torch.empty(K, D)) if config.rank_gate else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As large as item embeddings are, or waves."""
        (N, K), (_, D) = self.places_NK.shape, self.directions_KD.shape
        if self.gate_KD is not None:
            self.gate_KD.zero_()
        if self.random:
            for table in (self.places_NK, self.directions_KD):
                nn.init.normal_(table, std=(EMBEDDING_STD / K**0.5) ** 0.5)
            return
        table_ND = sinusoidal(N, D, torch.device("cpu")).double() * self.wave_size
        u_NR, s_R, v_RD = torch.linalg.svd(table_ND, full_matrices=False)
        self.places_NK.zero_()
        self.directions_KD.zero_()
        rank = min(K, len(s_R))
        root_R = s_R[:rank].sqrt()
        self.places_NK[:, :rank] = (u_NR[:, :rank] * root_R).to(self.places_NK)
        self.directions_KD[:rank] = (root_R[:, None] * v_RD[:rank]).to(self.directions_KD)

    def forward(self, N: int, target_BD: Tensor) -> Tensor:
        """(N, D), oldest place first; with a gate (B, N, D)."""
        places = self.places_NK[:N].flip(0)
        if self.gate_KD is not None:
            places = places * 2 * (target_BD @ self.gate_KD.T).sigmoid()[:, None]
        return places @ self.directions_KD


class LearnedRankEncoding(nn.Module):
    """A plain table of places."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        self.waves = config.rank_start == "waves"
        self.places_ND = nn.Parameter(torch.empty(config.max_history, config.hidden_size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Small normal numbers, as for items; or waves of size one."""
        if self.waves:
            N, D = self.places_ND.shape
            self.places_ND.copy_(sinusoidal(N, D, self.places_ND.device))
        else:
            nn.init.normal_(self.places_ND, std=EMBEDDING_STD)

    def forward(self, N: int, target_BD: Tensor) -> Tensor:
        """(N, D), oldest place first."""
        del target_BD
        return self.places_ND[:N].flip(0)


class SinusoidalRankEncoding(nn.Module):
    """Fixed waves (Vaswani et al. 2017), scaled by one learned number."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        self.hidden_size, self.wave_size = config.hidden_size, wave_size(config)
        self.scale = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """As large as item embeddings are, or of size one."""
        nn.init.constant_(self.scale, self.wave_size)

    def forward(self, N: int, target_BD: Tensor) -> Tensor:
        """(N, D), oldest place first."""
        del target_BD
        waves_ND = sinusoidal(N, self.hidden_size, self.scale.device).flip(0)
        return self.scale * waves_ND.to(self.scale.dtype)


class TargetRelativeTimeEncoding(nn.Module):
    """Time to the target, coarse to fine: a row for the octave, plus one for the part inside it.

    Buckets come from `models.trip.history.bucket`.
    """

    def __init__(self, octaves: int, fine: int, hidden_size: int) -> None:
        super().__init__()
        self.fine = fine
        self.coarse_CD = nn.Parameter(torch.empty(octaves, hidden_size))
        self.fine_CFD = nn.Parameter(torch.empty(octaves * fine, hidden_size))

    def reset_parameters(self) -> None:
        """Coarse rows as for items; fine ones start at zero, and are learnt as corrections."""
        nn.init.normal_(self.coarse_CD, std=EMBEDDING_STD)
        nn.init.zeros_(self.fine_CFD)

    def forward(self, buckets_BN: Tensor) -> Tensor:
        """(B, N, D). Both parts are added in the table, which is small: its gradient is formed once."""
        table_CFD = self.coarse_CD.repeat_interleave(self.fine, dim=0) + self.fine_CFD
        return nn.functional.embedding(buckets_BN, table_CFD)


class CoarseTimeEncoding(nn.Module):
    """TIN's encoding of intervals (Zhou et al. 2024): one table, whose first row is the target's.

    The table's rows are octaves, as those of the coarse half of TRTE.
    """

    def __init__(self, octaves: int, fine: int, hidden_size: int) -> None:
        super().__init__()
        self.fine = fine
        self.coarse_CD = nn.Parameter(torch.empty(octaves, hidden_size))

    def reset_parameters(self) -> None:
        """As for items."""
        nn.init.normal_(self.coarse_CD, std=EMBEDDING_STD)

    def forward(self, buckets_BN: Tensor) -> Tensor:
        """(B, N, D)."""
        return nn.functional.embedding(buckets_BN // self.fine, self.coarse_CD)


EMBEDDING_STD = 0.02
"""Of the first numbers in every table."""


def wave_size(config: TripConfig) -> float:
    """The height of waves at the start."""
    return 1.0 if config.rank_start == "waves" else EMBEDDING_STD * math.sqrt(2)


def sinusoidal(N: int, D: int, device: torch.device) -> Tensor:
    """Waves of wavelengths 2 pi to 20,000 pi over places 0 to N - 1: (N, D), sines then cosines."""
    rates = 10000.0 ** (-torch.arange(0, D, 2, device=device) / D)
    angles = torch.arange(N, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :D]


def rank_encoding(config: TripConfig) -> nn.Module | None:
    """The one that `model.rank` names."""
    if config.rank == "fre":
        return FactorizedRankEncoding(config)
    if config.rank == "learned":
        return LearnedRankEncoding(config)
    return SinusoidalRankEncoding(config) if config.rank == "sinusoidal" else None


def time_encoding(config: TripConfig) -> nn.Module | None:
    """The one that `model.time` names."""
    kinds = {"trte": TargetRelativeTimeEncoding, "tin": CoarseTimeEncoding}
    if config.time == "none":
        return None
    return kinds[config.time](config.time_octaves, config.time_fine, config.hidden_size)
