"""What the doctor says: one line a finding, and what to do about those that are not well."""

from collections.abc import Iterable
from dataclasses import dataclass

WELL, NOTE, PROBLEM = "well", "note", "problem"
"""All right; something that a run can do without; something that a run would fail over."""
SIGNS = {WELL: "  ok ", NOTE: "note ", PROBLEM: "BAD  "}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str
    text: str
    remedy: str = ""


def lines(findings: Iterable[Finding]) -> list[str]:
    """For people."""
    found = list(findings)
    width = max(len(each.what) for each in found)
    return [
        f"{SIGNS[each.state]} {each.what:<{width}}  {each.text}"
        + (f": {each.remedy}" if each.remedy else "")
        for each in found
    ]


def is_fit(findings: Iterable[Finding]) -> bool:
    """Whether a run can start here."""
    return all(each.state != PROBLEM for each in findings)
