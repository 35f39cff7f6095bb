"""What widths cost in trainable parameters, and widths that never cost more than they may."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A matrix, as far as costs go."""

    outputs: int
    inputs: int

    @property
    def components(self) -> int:
        """How many there are."""
        return min(self.outputs, self.inputs)


def cost(kind: str, shape: Shape, width: int) -> int:
    """Trainable parameters of `width` rows in parametrisation `kind`."""
    if kind in ("dir_ab", "svd_ab"):
        return width * (shape.outputs + shape.inputs)
    if kind == "left":
        return width * shape.inputs
    return width * width if kind == "core" else width


def total_cost(kind: str, shapes: Sequence[Shape], widths: Sequence[int]) -> int:
    """Trainable parameters of all matrices."""
    return sum(cost(kind, shape, width) for shape, width in zip(shapes, widths, strict=True))


def project(
    kind: str,
    shapes: Sequence[Shape],
    widths: Sequence[int],
    preferences: Sequence[Sequence[float]],
    allowed: Sequence[int],
    budget: int,
) -> list[int]:
    """`widths` made narrower until they cost at most `budget`, the same ones every time.

    `preferences` has, for each matrix, the log-probability of each of the `allowed` widths (ascending,
    with 0 first). While it is too much, the matrix whose width is the least preferred to the next
    narrower one, per parameter that this saves, gets the narrower one; the first of equals. What fits
    stays as it is.
    """
    assert list(allowed) == sorted({0, *allowed}), f"widths {allowed}"
    level = [allowed.index(width) for width in widths]

    def margin(matrix: int) -> float:
        at = level[matrix]
        saved = cost(kind, shapes[matrix], allowed[at]) - cost(
            kind, shapes[matrix], allowed[at - 1]
        )
        return (preferences[matrix][at] - preferences[matrix][at - 1]) / saved

    spent = total_cost(kind, shapes, [allowed[at] for at in level])
    while spent > budget:
        least = min((m for m in range(len(level)) if level[m] > 0), key=margin)
        spent -= cost(kind, shapes[least], allowed[level[least]])
        level[least] -= 1
        spent += cost(kind, shapes[least], allowed[level[least]])
    return [allowed[at] for at in level]
