"""The load-balance loss: experts that are visited often should be less likely.

Legend: L layers with experts, E experts, k experts a row.

For a layer, E * sum over experts of (share of visits) * (mean normalized score), which is 1 when all
experts are equally loaded and up to E when all rows visit the same (Fedus et al. 2021, "Switch
Transformers", equation 4, for k visits). Both factors are means over *all* rows, on whatever rank they
are: as a product of means over parts it would depend on how rows are spread over ranks (Qiu et al. 2025,
"Demons in the Detail"). Visits have no gradient, so a rank needs their sum from the others, and no more:
its own rows' scores are its part of the loss.
"""

from torch import Tensor


def balance_loss(chances_LE: Tensor, visits_LE: Tensor, num_rows: Tensor | float) -> Tensor:
    """This rank's part of the loss, a scalar, averaged over layers; all parts add up to the loss.

    `chances_LE` are summed over this rank's rows, `visits_LE` over all ranks, as is `num_rows`.
    """
    L, E = chances_LE.shape
    if L == 0:
        return chances_LE.sum()
    share_LE = visits_LE / visits_LE.sum(1, keepdim=True).clamp(min=1)
    return (chances_LE * share_LE.to(chances_LE.dtype)).sum() * (E / L) / num_rows
