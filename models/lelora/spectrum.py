"""Singular values and directions of a weight matrix: exact, and the same ones every time.

    L matrices, M outputs, N inputs, K = min(M, N) components, J components that are kept

A matrix has the form sum of s_k u_k v_k^T over its components, largest s first. Randomised methods see
the largest ones only, so the decomposition is the exact one, and it is worked out once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Atoms:
    """All singular values of a matrix, and the directions of some of its components."""

    values_K: Tensor
    components_J: Tensor
    """Which components have their directions here, ascending, as int64."""
    left_MJ: Tensor
    right_JN: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """M and N of the matrix."""
        return self.left_MJ.shape[0], self.right_JN.shape[1]

    def pick(self, components: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Left directions (M, r), values (r) and right directions (r, N) of r components, in order."""
        wanted = torch.as_tensor(list(components), dtype=torch.int64)
        at = torch.searchsorted(self.components_J, wanted)
        found = self.components_J[at.clamp(max=max(len(self.components_J) - 1, 0))]
        assert torch.equal(found, wanted), f"components {components} are not all among the atoms"
        return self.left_MJ[:, at], self.values_K[wanted], self.right_JN[at]


def decompose(
    weight_MN: Tensor, components: Sequence[int], dtype: torch.dtype = torch.float32
) -> Atoms:
    """The exact singular value decomposition of a matrix, of which `components` keep directions.

    Worked out in `dtype` where the matrix is, or on the CPU if that fails there (cuSOLVER does not
    converge on some matrices, and needs memory). Results are on the CPU, in fp32, with the largest
    entry of each left direction positive: signs are otherwise a matter of taste. Raises `ValueError`
    for a matrix that is not finite.
    """
    weight_MN = weight_MN.detach().to(dtype)
    if not bool(torch.isfinite(weight_MN).all()):
        raise ValueError("the matrix has entries that are not finite")
    left_MK, values_K, right_KN = _svd(weight_MN)
    wanted = torch.as_tensor(sorted(set(components)), dtype=torch.int64)
    left_MJ = left_MK[:, wanted.to(left_MK.device)]
    right_JN = right_KN[wanted.to(right_KN.device)]
    largest_J = left_MJ.abs().argmax(0, keepdim=True)
    signs_J = torch.where(left_MJ.gather(0, largest_J)[0] < 0, -1.0, 1.0).to(dtype)
    return Atoms(
        values_K.cpu().float(),
        wanted,
        (left_MJ * signs_J).cpu().float(),
        (right_JN * signs_J[:, None]).cpu().float(),
    )


def decompose_stack(w_LMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of many matrices of one shape: (L, M, K), (L, K), (L, K, N), in fp32, where they are.

    From eigenvectors of the smaller of W^T W and W W^T in fp64, many times as fast on a GPU as one
    decomposition after another. That squares the condition: directions are as exact as above for
    components that are not below 1e-6 of the largest, and no others should be trained.
    """
    w_LMN = w_LMN.double()
    tall = w_LMN.shape[1] >= w_LMN.shape[2]
    x_LXK = w_LMN if tall else w_LMN.transpose(1, 2)
    squares_LK, inner_LKK = _eigh(x_LXK.transpose(1, 2) @ x_LXK)
    values_LK = squares_LK.flip(1).clamp(min=0).sqrt()
    inner_LKK = inner_LKK.flip(2)
    outer_LXK = x_LXK @ inner_LKK / values_LK.clamp(min=1e-30)[:, None]
    left_LMK, right_LNK = (outer_LXK, inner_LKK) if tall else (inner_LKK, outer_LXK)
    largest_L1K = left_LMK.abs().argmax(1, keepdim=True)
    signs_L1K = torch.where(left_LMK.gather(1, largest_L1K) < 0, -1.0, 1.0).to(w_LMN)
    right_LKN = (right_LNK * signs_L1K).transpose(1, 2).contiguous()
    return (left_LMK * signs_L1K).float(), values_LK.float(), right_LKN.float()


def _eigh(gram_LKK: Tensor) -> tuple[Tensor, Tensor]:
    try:
        squares_LK, inner_LKK = torch.linalg.eigh(gram_LKK)
        if bool(torch.isfinite(squares_LK).all()):
            return squares_LK, inner_LKK
    except RuntimeError:
        if gram_LKK.device.type == "cpu":
            raise
    squares_LK, inner_LKK = torch.linalg.eigh(gram_LKK.cpu())
    return squares_LK.to(gram_LKK.device), inner_LKK.to(gram_LKK.device)


def _svd(weight_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        left, values, right = torch.linalg.svd(weight_MN, full_matrices=False)
        if bool(torch.isfinite(values).all()):
            return left, values, right
    except RuntimeError:  # LinAlgError and OutOfMemoryError among them
        if weight_MN.device.type == "cpu":
            raise
    left, values, right = torch.linalg.svd(weight_MN.cpu().double(), full_matrices=False)
    return left.to(weight_MN.dtype), values.to(weight_MN.dtype), right.to(weight_MN.dtype)


SVD_RATE = 1e12
"""Operations a second at which a GPU decomposes: an estimate, from which plans take their time."""


def svd_flops(shape: tuple[int, int]) -> float:
    """Floating-point operations of the exact decomposition, about: both sides, Golub and Reinsch."""
    m, n = max(shape), min(shape)
    return 4.0 * m * n * n + 22.0 * n**3


def svd_nbytes(shape: tuple[int, int]) -> int:
    """Bytes that the decomposition of one fp32 matrix needs at once: itself, a copy, both sides."""
    m, n = shape
    k = min(m, n)
    return 4 * (2 * m * n + m * k + k * n + 3 * k * k)


def svd_words(shapes: Sequence[tuple[int, int]]) -> str:
    """What decompositions of matrices of these shapes take."""
    work = sum(map(svd_flops, shapes))
    return (
        f"exact, once for a base model: {len(shapes)} matrices, {work:.1e} operations over all ranks "
        f"(about {work / SVD_RATE / 60:,.1f} minutes of one GPU), up to "
        f"{max(map(svd_nbytes, shapes)) / 2**30:.2f} GiB at a time"
    )
