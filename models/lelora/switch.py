"""Other rows train from now on, and the model computes what it computed before.

    M outputs, N inputs, R rows of an adapter

    rows that leave    what they add goes into the fold, with the scale it had; they and their moments
                       are 0, and stay so: what is 0 on both sides gets no gradient
    rows that stay     stay where they are, with their moments; a factor takes up a change of scale
    rows that arrive   get the directions of their component, and no effect yet; their moments are new

New moments need a count of steps of their own: `models.lelora.row_steps`.

Everything here works on whole tensors of one adapter; who owns shards of them gathers before, and puts
back after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.lelora import fold
from models.lelora.adapter import KINDS, LEADING, row_factors

Directions = Callable[[Sequence[int]], tuple[Tensor, Tensor, Tensor]]
"""Left directions (M, r), singular values (r), right directions (r, N) of r components."""
Moments = dict[str, dict[str, Tensor]]
"""AdamW's `exp_avg` and `exp_avg_sq` of each trained tensor; empty before the first step."""


@dataclass(frozen=True)
class Switched:
    """What a switch did to one adapter."""

    kept: int
    arrived: int
    left: int
    discarded: float = 0.0
    """Share of the fold that was lost to make room."""
    refused: bool = False
    """It would have lost too much: nothing was changed."""


@torch.no_grad()
def switch(
    kind: str,
    whole: dict[str, Tensor],
    moments: Moments,
    components: Sequence[int],
    scale: float,
    directions: Directions,
    tolerance: float = 1e-3,
) -> Switched:
    """Have an adapter train `components` at `scale`; `whole` and `moments` are changed in place.

    `tolerance` is the share of the fold that may be lost; beyond it, the switch is refused.
    """
    now = whole["components_R"].tolist()
    wanted = list(dict.fromkeys(components))
    assert len(wanted) <= len(now), f"{len(wanted)} components for {len(now)} rows"
    leaving = [
        row for row, component in enumerate(now) if component >= 0 and component not in wanted
    ]
    kept = [row for row, component in enumerate(now) if component in wanted]
    arriving = [component for component in wanted if component not in now]
    free = [row for row in range(len(now)) if row not in kept][: len(arriving)]

    discarded = 0.0
    if leaving:
        folded = fold.add(
            whole["fold_b_MC"], whole["fold_a_CN"], *_leave(kind, whole, leaving, kept)
        )
        if folded.discarded > tolerance:
            return Switched(len(kept), 0, 0, folded.discarded, refused=True)
        discarded = folded.discarded
        whole["fold_b_MC"].zero_()[:, : folded.rank] = folded.left_MC
        whole["fold_a_CN"].zero_()[: folded.rank] = folded.right_CN
    _rescale(kind, whole, moments, float(whole["scale"]), scale)
    whole["gate_R"][leaving] = 0.0
    whole["components_R"][leaving] = -1
    _clear(kind, whole, [row for row in leaving if row not in free])
    for name, entry in moments.items():
        for view in _moment_rows(name, entry, sorted({*leaving, *free})):
            view.zero_()
    if arriving:
        _arrive(kind, whole, free, arriving, directions)
        whole["age_R"][free] = 0.0
    whole["scale"].fill_(scale)
    whole["gate_R"][kept + free] = scale
    return Switched(len(kept), len(arriving), len(leaving), discarded)


def _leave(
    kind: str, whole: dict[str, Tensor], leaving: list[int], kept: list[int]
) -> tuple[Tensor, Tensor]:
    """Factors of what the update loses when `leaving` rows go and `kept` ones stay."""
    if kind != "core":
        left, right = row_factors(kind, whole, torch.tensor(leaving))
        used = (left != 0).any(0) & (right != 0).any(1)
        return left[:, used], right[used]
    # R couples the rows: all of those that go, and the columns of those that go in the rows that stay
    core, gate = whole["core_RR"].double(), whole["gate_R"].double()
    left, right = whole["u_MR"].double() * gate, whole["v_RN"].double()
    rows = leaving + kept
    top = core[leaving][:, rows] @ right[rows]
    side = left[:, kept] @ core[kept][:, leaving]
    return torch.cat([left[:, leaving], side], 1), torch.cat([top, right[leaving]], 0)


def _rescale(
    kind: str, whole: dict[str, Tensor], moments: Moments, before: float, after: float
) -> None:
    """The leading factor takes up the change of scale; its gradients change by the inverse."""
    if before == after:
        return
    for name in LEADING[kind]:
        whole[name] *= before / after
        if moments.get(name):
            moments[name]["exp_avg"] *= after / before
            moments[name]["exp_avg_sq"] *= (after / before) ** 2


def _rows_of(name: str, tensor: Tensor, rows: list[int]) -> list[Tensor]:
    """Views of `rows` of `tensor`, along every axis that counts rows."""
    letters = name.rpartition("_")[2]
    return [
        tensor.movedim(axis, 0)[row] for axis, x in enumerate(letters) if x == "R" for row in rows
    ]


def _clear(kind: str, whole: dict[str, Tensor], rows: list[int]) -> None:
    trained, fixed = KINDS[kind]
    for name in (*trained, *fixed):
        for view in _rows_of(name, whole[name], rows):
            view.zero_()


def _arrive(
    kind: str,
    whole: dict[str, Tensor],
    rows: list[int],
    components: list[int],
    directions: Directions,
) -> None:
    """Put the directions of `components` into `rows`, with a product of 0."""
    _clear(kind, whole, rows)
    whole["components_R"][rows] = torch.tensor(components, device=whole["components_R"].device)
    left_Mr, _, right_rN = directions(components)
    if kind == "dir_ab":
        whole["a_RN"][rows] = right_rN.to(whole["a_RN"])
    elif kind == "svd_ab":
        # one norm for all windows: with sqrt(s), the best learning rate would depend on the window
        for name in ("a_RN", "a0_RN"):
            whole[name][rows] = right_rN.to(whole[name])
        for name in ("b_MR", "b0_MR"):
            whole[name][:, rows] = left_Mr.to(whole[name])
    else:
        whole["u_MR"][:, rows] = left_Mr.to(whole["u_MR"])
        if "v_RN" in whole:
            whole["v_RN"][rows] = right_rN.to(whole["v_RN"])


def _moment_rows(name: str, entry: dict[str, Tensor], rows: list[int]) -> list[Tensor]:
    keys = ("exp_avg", "exp_avg_sq") if entry else ()
    return [view for key in keys for view in _rows_of(name, entry[key], rows)]
