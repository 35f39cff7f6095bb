"""The sum of what a query got in several places.

Legend: Q queries, D head dim, R parts of all queries, n parts a query, P = n + 1 with its own.
"""

import torch
from torch import Tensor


def merge(
    own_QD: Tensor, part_RD: Tensor, place_nQ: Tensor, weights_PQ: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(Q, D) in `dtype`: each query's own and its parts, in the order of its choices, weighted if asked.

    `place_nQ` says where its parts are, -1 for none. What lies where no part is may be anything. Sums
    are formed in fp32, or in fp64 where that is given.
    """
    if own_QD.device.type == "cuda":
        from models.hybrid.merging_triton import merge_on_device  # Triton comes with CUDA builds

        return merge_on_device(own_QD, part_RD, place_nQ, weights_PQ, dtype)
    wide = torch.promote_types(own_QD.dtype, torch.float32)
    total_QD = own_QD.to(wide)
    if weights_PQ is not None:
        total_QD = total_QD * weights_PQ[0, :, None]
    for number, place_Q in enumerate(place_nQ):
        part_QD = part_RD[place_Q].masked_fill(place_Q[:, None] < 0, 0.0).to(wide)
        total_QD = total_QD + (
            part_QD if weights_PQ is None else part_QD * weights_PQ[number + 1, :, None]
        )
    return total_QD.to(dtype)
