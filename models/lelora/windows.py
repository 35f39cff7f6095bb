"""Which components of a matrix there are to choose from.

    K components of a matrix, R rows of its adapter

Without the window action, a matrix has one order of R components, and width w trains the first w.
With it, an action names one of eight places, and the w components from there on train.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

WINDOWS = ("random", "gaussian", "principal", "middle", "minor", "even")
STARTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1.0)
"""Where a window may begin: so far from the largest component towards the last that leaves room."""


def regions(k: int) -> tuple[range, range, range]:
    """Principal, intermediate and minor components out of `k`: an eighth, the rest, an eighth."""
    edge = k // 8
    return range(0, edge), range(edge, k - edge), range(k - edge, k)


def order(kind: str, rows: int, k: int, key: str) -> list[int]:
    """At most `rows` components out of `k`, those that train first coming first.

    `key` decides what is random: the run's seed and the matrix's name. `gaussian` has directions that
    are no components at all, and only numbers them.
    """
    rows = min(rows, k)
    if kind in ("principal", "gaussian"):
        return list(range(rows))
    if kind == "minor":
        return [k - 1 - n for n in range(rows)]
    if kind == "middle":
        first = (k - rows) // 2
        return list(range(first, first + rows))
    if kind == "even":
        return [_even(n, rows, k) for n in _spread(rows)]
    return list(_drawn(rows, k, key))


def window(start: int, width: int, k: int) -> list[int]:
    """The `width` components that begin at place number `start` of `STARTS`."""
    width = min(width, k)
    first = round(STARTS[start] * (k - width))
    return list(range(first, first + width))


def needed(windows: bool, kind: str, widths: Sequence[int], k: int, key: str) -> list[int]:
    """All components whose directions some action may ask for."""
    widest = max(widths)
    found = set(order(kind, widest, k, key))
    if windows:
        for width in widths:
            for start in range(len(STARTS)):
                found.update(window(start, width, k))
    return sorted(found)


@lru_cache(maxsize=65536)
def _drawn(rows: int, k: int, key: str) -> tuple[int, ...]:
    """Kept, since every decision asks for it anew, and thousands of digests are not for nothing."""
    ranked = sorted(range(k), key=lambda component: _digest(f"{key}/{component}"))
    return tuple(ranked[:rows])


def _even(number: int, rows: int, k: int) -> int:
    return (2 * number + 1) * k // (2 * rows)


def _spread(rows: int) -> list[int]:
    """0 to rows - 1 in such an order that every beginning of it is spread out."""
    bits = max((rows - 1).bit_length(), 1)
    turned = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(2**bits))
    return [n for n in turned if n < rows]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
