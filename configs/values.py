"""The checks that every configuration class shares, so that all messages read alike."""

import difflib
from collections.abc import Iterable


def one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed`; the message names the nearest one."""
    allowed = sorted(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.4)
    hint = f"set {key}={near[0]}" if near else f"set {key} to one of them"
    listed = ", ".join(allowed) if len(allowed) <= 20 else f"the {len(allowed)} that exist"
    raise ValueError(f"{key}={value} is not one of {listed}: {hint}")


def at_least(key: str, value: float, low: float) -> None:
    """Raise `ValueError` if `value` is below `low`."""
    if not value >= low:  # so that NaN is too small, too
        raise ValueError(f"{key}={value} is too small: set {key} to {low:g} or more")
