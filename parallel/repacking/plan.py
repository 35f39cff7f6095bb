"""The plan of one step: which samples share a parent, and which child of it each sample lives in.

    ranks     0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15 | 16 ...
    parents   [          SP16: samples 7 2 5 9 4 1            ] [ SP4 ...
    children  [       SP8: 7 2       ] [   SP4: 5  ] [9] [4] [1][] ...

Full-attention layers run over the whole parent. Hidden states, sparse layers and all that goes row by
row live in the children, each inside one node. Pure data: the same on every rank, and comparable by
hash.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from parallel.repacking.layout import Ints, Layout, stream

FORMAT = 1
"""Of the serialised plan; a plan of another format is refused."""

REPACKED = ""
NARROW = "narrow"
NO_GAIN = "no gain"
MEMORY = "memory"
FALLBACKS = {
    REPACKED: "the samples are repacked into children",
    NARROW: "the parent lies inside one node, so that nothing of it crosses nodes",
    NO_GAIN: "children would not be faster, by the model's own count",
    MEMORY: "no child can hold the longest sample",
}
"""Why a parent may keep its own layout in all layers, or that it does not."""


@dataclass(frozen=True, eq=False)
class Child:
    """Ranks that share the rows of some samples, and these samples in the order of their rows."""

    first_rank: int
    width: int
    samples: Ints
    """Ids."""


@dataclass(frozen=True, eq=False)
class Parent:
    """Ranks that share the full-attention layers of some samples."""

    first_rank: int
    width: int
    children: tuple[Child, ...]
    """In the order of their ranks, side by side; without samples where ranks stay empty."""
    fallback: str = REPACKED
    """One of `FALLBACKS`. With a fallback there is one child: the parent itself."""

    @property
    def samples(self) -> Ints:
        """Ids of all its samples, in the order of their rows."""
        return np.concatenate([np.zeros(0, np.int64), *(child.samples for child in self.children)])

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first_rank, self.first_rank + self.width)


@dataclass(frozen=True, eq=False)
class Plan:
    """Parents side by side over all ranks, and every sample of the step in one of them."""

    num_ranks: int
    node_size: int
    ids: Ints
    """Ids of the step's samples, ascending."""
    lengths: Ints
    """Their lengths."""
    parents: tuple[Parent, ...]
    seconds: float = field(default=0.0)
    """What the cost model predicts for the step; no part of the plan's identity."""

    def lengths_of(self, samples: Ints) -> Ints:
        """Lengths by id."""
        return self.lengths[np.searchsorted(self.ids, samples)]

    def parent_of(self, rank: int) -> Parent:
        """The parent that `rank` is in."""
        starts = [parent.first_rank for parent in self.parents]
        return self.parents[int(np.searchsorted(starts, rank, side="right")) - 1]

    def child_of(self, rank: int) -> Child:
        """The child that `rank` is in."""
        children = self.parent_of(rank).children
        starts = [child.first_rank for child in children]
        return children[int(np.searchsorted(starts, rank, side="right")) - 1]

    def layout(self, parent: Parent) -> Layout:
        """Where the rows of `parent` are outside its full-attention layers."""
        samples = [child.samples for child in parent.children]
        ends = np.cumsum([len(ids) for ids in samples])[:-1]
        lengths = np.split(self.lengths_of(parent.samples), ends)
        return stream(samples, lengths, [child.width for child in parent.children])

    def wide_layout(self, parent: Parent) -> Layout:
        """The same stream, spread evenly over the parent: the layout without repacking."""
        samples = parent.samples
        return stream([samples], [self.lengths_of(samples)], [parent.width])

    @cached_property
    def digest(self) -> str:
        """A hash of everything that ranks must agree about."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(np.array([FORMAT, self.num_ranks, self.node_size], np.int64).tobytes())
        hasher.update(self.ids.tobytes() + self.lengths.tobytes())
        for parent in self.parents:
            hasher.update(parent.fallback.encode())
            for child in parent.children:
                head = [parent.first_rank, child.first_rank, child.width, len(child.samples)]
                hasher.update(np.array(head, np.int64).tobytes() + child.samples.tobytes())
        return hasher.hexdigest()

    def to_json(self) -> str:
        """The whole plan as JSON."""
        return json.dumps(
            {
                "format": FORMAT, "num_ranks": self.num_ranks, "node_size": self.node_size,
                "seconds": self.seconds, "ids": self.ids.tolist(), "lengths": self.lengths.tolist(),
                "parents": [
                    {
                        "first_rank": parent.first_rank, "width": parent.width,
                        "fallback": parent.fallback,
                        "children": [
                            {"first_rank": c.first_rank, "width": c.width, "samples": c.samples.tolist()}
                            for c in parent.children
                        ],
                    }
                    for parent in self.parents
                ],
            }
        )  # fmt: skip

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read `to_json` back. Raises `ValueError` for what is not a valid plan of this format."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(
                    f"a plan of format {data['format']}, but this reads format {FORMAT}"
                )
            plan = Plan(
                data["num_ranks"], data["node_size"], _ints(data["ids"]), _ints(data["lengths"]),
                tuple(
                    Parent(
                        p["first_rank"], p["width"],
                        tuple(
                            Child(c["first_rank"], c["width"], _ints(c["samples"]))
                            for c in p["children"]
                        ),
                        p["fallback"],
                    )
                    for p in data["parents"]
                ),
                data["seconds"],
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        check(plan)
        return plan


def _ints(values: Sequence[Any]) -> Ints:
    return np.array(values, np.int64).reshape(-1)


def check(plan: Plan) -> None:
    """Raise `ValueError` unless `plan` keeps every rule that its users rely on."""
    rank, found = 0, []
    for parent in plan.parents:
        where = f"parent of ranks {parent.first_rank} to {parent.first_rank + parent.width - 1}"
        if parent.first_rank != rank:
            raise ValueError(f"{where} should begin at rank {rank}")
        _check_aligned(where, parent.first_rank, parent.width)
        if parent.fallback not in FALLBACKS:
            raise ValueError(f"{where} has the unknown fallback {parent.fallback!r}")
        if parent.fallback and len(parent.children) != 1:
            raise ValueError(f"{where} falls back, but has {len(parent.children)} children")
        for child in parent.children:
            who = f"child of ranks {child.first_rank} to {child.first_rank + child.width - 1}"
            if child.first_rank != rank:
                raise ValueError(f"{who} should begin at rank {rank}")
            _check_aligned(who, child.first_rank, child.width)
            last = child.first_rank + child.width - 1
            if not parent.fallback and child.first_rank // plan.node_size != last // plan.node_size:
                raise ValueError(f"{who} lies on two nodes of {plan.node_size}")
            rank += child.width
            found.append(child.samples)
        if rank != parent.first_rank + parent.width:
            raise ValueError(f"{where} has children up to rank {rank - 1}")
    if rank != plan.num_ranks:
        raise ValueError(f"parents for {rank} ranks, but there are {plan.num_ranks}")
    placed = np.sort(np.concatenate([np.zeros(0, np.int64), *found]))
    if not np.array_equal(placed, plan.ids) or len(plan.ids) != len(plan.lengths):
        raise ValueError("the samples of the parents are not those of the step, each once")
    if len(plan.ids) and (plan.lengths.min() < 1 or np.any(np.diff(plan.ids) <= 0)):
        raise ValueError("samples need ids of their own, ascending, and lengths of at least 1")


def _check_aligned(who: str, first: int, width: int) -> None:
    if width < 1 or width & (width - 1) or first % width:
        raise ValueError(f"{who}: a width must be a power of two and begin at a multiple of itself")
