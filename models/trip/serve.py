"""Scores candidates for a user, from a folder that `python -m trainer.export` wrote.

scorer = Scorer.load("exported")
chances = scorer.score(history=[("50", "5", 100), ("181", "4", 160)], candidates=["1", "7"], time=200)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.history import Grouping, ages, bucket, time_edges
from models.trip.model import Trip

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""Reads whole tensors by name."""


def as_now(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of older folders by the names that they have now."""
    found = {}
    for name, tensor in stored.items():
        head, of, kind = name.rpartition("key_value.")
        if of and kind == "weight":
            key_DD, found[f"{head}value_DD"] = (x.clone() for x in tensor.chunk(2))
            if f"{head}query.weight" in stored:  # without one, nobody asks
                found[f"{head}key_DD"] = key_DD
        elif of:
            found[f"{head}value_D"] = tensor.chunk(2)[1].clone()  # a bias of keys changes nothing
        else:
            found["items.rows_VD" if name == "items_VD" else name] = tensor
    return found


def write_folder(
    out: Path,
    model: nn.Module,
    read: Read,
    config: TripConfig,
    vocabulary: Mapping[str, int],
    behaviours: Mapping[str, int],
    grouping: Grouping,
    features: Mapping[str, Sequence[int]],
) -> None:
    """Weights, and everything that turns a request into whole numbers, as `Scorer.load` reads them."""
    save_file(read(list(model.state_dict())), out / "model.safetensors")
    about = {
        "model": asdict(config),
        "grouping": asdict(grouping),
        "behaviours": dict(behaviours),
        "items": dict(vocabulary),
        "features": dict(features),
    }
    (out / "trip.json").write_text(json.dumps(about, indent=1))


@dataclass(frozen=True)
class Scorer:
    """A model, and the names that its numbers stand for."""

    model: Trip
    items: Mapping[str, int]
    behaviours: Mapping[str, int]
    grouping: Grouping
    features: Mapping[str, Sequence[int]]
    """Of each item; none at all where the model reads none."""

    @classmethod
    def load(cls, folder: Path | str) -> "Scorer":
        """Read an exported folder. Raises `ValueError` for one that is none."""
        try:
            about = json.loads((Path(folder) / "trip.json").read_text())
            items, behaviours = about["items"], about["behaviours"]
            features = about.get("features", {})  # folders from before features have none
            of = about["grouping"]
            grouping = Grouping(tuple(of["edges"]), of["gap"], of["sessions"])
            model = Trip(
                TripConfig(**about["model"]),
                num_items=max(items.values()) + 1,
                num_behaviours=len(behaviours),
                groups=grouping.count,
                num_features=max((max(of) for of in features.values()), default=0),
            )
            stored = load_file(Path(folder) / "model.safetensors")
            model.load_state_dict(as_now(stored))
        except KeyError as error:
            raise ValueError(f"{folder} is no exported folder: it has no {error}") from error
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{folder} is no exported folder: {why}") from error
        return cls(model.eval(), items, behaviours, grouping, features)

    @torch.no_grad()
    def score(
        self,
        history: Sequence[tuple[str, str | None, int]],
        candidates: Sequence[str],
        time: int,
    ) -> list[float]:
        """The chance of a click on each candidate at `time`, in seconds.

        `history` has item, behaviour (None where the model knows none) and time, oldest first. Raises
        `ValueError` for items and behaviours that are unknown, for times that do not ascend or are no
        whole numbers, and for an event that is not before `time`.
        """
        if isinstance(candidates, str):
            raise ValueError(f"candidates are {candidates!r}: give a list of names")
        for row in history:
            if not isinstance(row, Sequence) or len(row) != 3:
                raise ValueError(f"{row!r} is no event: give item, behaviour (or None) and seconds")
        if not len(candidates):
            return []
        config = self.model.config
        newest = history[-config.max_history :]
        times = np.array([_seconds(at) for *_, at in history], dtype=np.int64)
        ages_n = ages(times, _seconds(time))[len(history) - len(newest) :]
        N = config.max_history
        items_N, behaviours_N, ages_N = (np.zeros(N, np.int64) for _ in range(3))
        begin = N - len(newest)
        items_N[begin:] = [self._item(item) for item, *_ in newest]
        behaviours_N[begin:] = [self._behaviour(behaviour) for _, behaviour, _ in newest]
        ages_N[begin:] = ages_n
        edges = time_edges(config.time_unit, config.time_octaves, config.time_fine)
        rows = (items_N, behaviours_N, ages_N, bucket(ages_N, edges), self.grouping(ages_N))
        targets = torch.tensor([self._item(item) for item in candidates])
        features_BNF = target_features_BF = None
        if self.features:
            known = torch.tensor([self.features[item] for item, *_ in newest])
            width = len(next(iter(self.features.values())))
            features_NF = torch.zeros(N, width, dtype=torch.long)
            features_NF[begin:] = known.view(-1, width)
            features_BNF = features_NF.expand(len(candidates), -1, -1)
            target_features_BF = torch.tensor([self.features[item] for item in candidates])
        logits = self.model(
            *(torch.from_numpy(row).expand(len(candidates), -1) for row in rows),
            targets,
            features_BNF=features_BNF,
            target_features_BF=target_features_BF,
        ).logits_B
        chances: list[float] = logits.sigmoid().tolist()
        return chances

    def _item(self, name: str) -> int:
        if not isinstance(name, str):
            raise ValueError(f"item {name!r} is no text: names of items are, such as {str(name)!r}")
        if name not in self.items:
            raise ValueError(f"item {name} is unknown: the model knows {len(self.items):,} items")
        return self.items[name]

    def _behaviour(self, name: str | None) -> int:
        if name is None:
            return 0
        if name not in self.behaviours:
            known = ", ".join(self.behaviours) or "none"
            raise ValueError(f"behaviour {name} is unknown: the model knows {known}")
        return self.behaviours[name]


def _seconds(value: int) -> int:
    """The same, if it is whole: fractions would be cut off without a word."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"time {value!r} is no whole number of seconds")
    return int(value)
