"""What widths cost in trainable parameters, and widths that never cost more (or less) than they may."""

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


def scaled(
    kind: str, shapes: Sequence[Shape], widths: Sequence[int], allowed: Sequence[int], budget: int
) -> list[int]:
    """`widths` times the largest factor up to 1 (in 64ths) at which they cost at most `budget`.

    Each is rounded down to one that is allowed, but not to 0. What a policy wants at one budget keeps
    its proportions at another. If the smallest factor costs too much, that is what comes back.
    """
    smallest = min(width for width in allowed if width > 0)

    def times(share: float) -> list[int]:
        return [
            max((w for w in allowed if w <= max(share * width, smallest)), default=0)
            if width
            else 0
            for width in widths
        ]

    for part in range(64, 0, -1):
        found = times(part / 64)
        if total_cost(kind, shapes, found) <= budget:
            return found
    return times(0)


def fill(
    kind: str,
    shapes: Sequence[Shape],
    widths: Sequence[int],
    preferences: Sequence[Sequence[float]],
    allowed: Sequence[int],
    budget: int,
) -> list[int]:
    """`widths` made wider until nothing more fits into `budget`, the same ones every time.

    In the words of `project`: while some next wider width fits its matrix and the budget, the matrix
    that prefers its own the most to what it has, per parameter, gets it; the first of equals.
    """
    level = [allowed.index(width) for width in widths]
    spent = total_cost(kind, shapes, widths)

    def more(matrix: int) -> int:
        now, then = allowed[level[matrix]], allowed[level[matrix] + 1]
        return cost(kind, shapes[matrix], then) - cost(kind, shapes[matrix], now)

    def gain(matrix: int) -> float:
        at = level[matrix]
        return (preferences[matrix][at + 1] - preferences[matrix][at]) / more(matrix)

    while True:
        fitting = [
            m
            for m, at in enumerate(level)
            if at + 1 < len(allowed)
            and allowed[at + 1] <= shapes[m].components
            and spent + more(m) <= budget
            and preferences[m][at + 1] > float("-inf")
        ]
        if not fitting:
            return [allowed[at] for at in level]
        most = max(fitting, key=lambda m: (gain(m), -m))
        spent += more(most)
        level[most] += 1
