"""Is what a policy has learnt to choose better than what it began with? Pairs of runs say.

    K pairs, X held-out samples

What a policy chooses was chosen for what it was worth in noisy runs, so it looks better than it is. So
in the end the two are run against each other, each pair on batches of its own, judged by samples that no
round was judged by. Both pairs and samples are a draw: the error of the mean difference is that of the
pairs' means and that of the samples' means together. Only what is better by more than `CLEARLY` errors
is taken; otherwise the policy is what it was before it was taught.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.host import broadcast, gather_objects
from recipes.lelora.brain import Setting
from recipes.lelora.ranks import num_ranks, this_rank

CLEARLY = 2.0

Judge = Callable[[Sequence[int], Sequence[Setting], bool], Tensor]
"""Trains one run of each setting, each on the stretch of batches that has its number, and gives the loss
of each sample, (runs, samples): of those that judge rounds, or (True) of those that judge contests."""


@dataclass(frozen=True)
class Contest:
    """What came of it."""

    gain: float
    """Mean difference of the losses, start minus chosen."""
    error: float
    """Standard error of it."""
    pairs: int

    @property
    def better(self) -> bool:
        """What was chosen is clearly better."""
        return self.gain > CLEARLY * self.error

    def words(self) -> str:
        """For the console."""
        if not self.pairs:
            return "which is what there was"
        kept = "taken" if self.better else "not taken"
        return f"better by {self.gain:.4f}, standard error {self.error:.4f}: {kept}"


def contest(judge: Judge, chosen: Setting, start: Setting, first: int, pairs: int) -> Contest:
    """`chosen` against `start`, on stretches from number `first` on. Collective."""
    chosen, start = broadcast((chosen, start))
    if chosen == start:
        return Contest(0.0, 0.0, 0)
    loss_PX = by_all(
        judge, [first + n // 2 for n in range(2 * pairs)], [chosen, start] * pairs, True
    )
    return compared(loss_PX[1::2] - loss_PX[::2])


def compared(gain_KX: Tensor) -> Contest:
    """Of the differences by pair and sample."""
    K, X = gain_KX.shape
    if min(K, X) < 2:
        return Contest(float(gain_KX.mean()), float("inf"), K)
    variance = gain_KX.mean(1).var() / K + gain_KX.mean(0).var() / X
    return Contest(float(gain_KX.mean()), float(variance.sqrt()), K)


def by_all(
    judge: Judge, numbers: Sequence[int], settings: Sequence[Setting], check: bool
) -> Tensor:
    """What `judge` says, each rank having its share of the runs: (P, X) in fp64. Collective."""
    rank, ranks = this_rank(), num_ranks()
    own = judge(numbers[rank::ranks], settings[rank::ranks], check).double().cpu()
    by_rank = gather_objects(own)
    return torch.stack([by_rank[n % ranks][n // ranks] for n in range(len(settings))])
