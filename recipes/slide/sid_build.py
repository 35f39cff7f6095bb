"""Stage `sid_build`: a semantic ID for every item, and a report of how good they are."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.host import broadcast
from configs.values import at_least, one_of
from models.slide.ids import SemanticIds, make_ids
from recipes.slide.artefacts import is_done, write_atomically, write_manifest
from recipes.slide.config import SequencesConfig
from recipes.slide.data import Data
from recipes.slide.sids import collisions
from recipes.slide.sids.features import item_features
from recipes.slide.sids.kmeans import Quantized, residual_kmeans
from recipes.slide.sids.report import report
from recipes.slide.sids.rqvae import rqvae
from recipes.slide.sids.stored import NAME, STAGE, write_ids

METHODS = ("kmeans", "rqvae", "given", "items")
REPORT = "sid_report.json"


@dataclass(kw_only=True)
class SidBuildConfig:
    """The `task` node."""

    name: str = STAGE
    method: str = "kmeans"
    """kmeans: residual k-means of the items' features; rqvae: by a trained autoencoder; given: as
    data.ids_key has them; items: one code, the item's number, which makes `gr_train` SASRec with full
    cross-entropy."""
    levels: int = 3
    """Codes of an ID; one more with task.collisions=suffix."""
    codes: int = 256
    """Codes of each level."""
    collisions: str = "reassign"
    """Items with the same codes: suffix (one more code tells them apart), reassign (the next nearest
    last code) or keep."""
    cap: int = 1
    """Items of an ID at most (for suffix: that share the other codes)."""
    features: int = 128
    """Numbers of an item out of its words, and as many out of co-occurrence."""
    cooccurrence: float = 1.0
    """Weight of who an item is met with in training; 0: only what the items' table says."""
    empty_text: bool = False
    """Go on if an item has no text."""
    seed: int = 0
    """Of the quantizers; not `trainer.seed`, so that runs with several seeds share the IDs."""
    rqvae_steps: int = 20_000
    """Steps of training (method rqvae)."""
    rqvae_batch: int = 1024
    """Items of one."""
    rqvae_lr: float = 1e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        one_of("task.method", self.method, METHODS)
        one_of("task.collisions", self.collisions, collisions.POLICIES)
        for name in ("levels", "cap", "features", "rqvae_steps", "rqvae_batch"):
            at_least(f"task.{name}", getattr(self, name), 1)
        for name, low in (("codes", 2), ("cooccurrence", 0), ("seed", 0)):
            at_least(f"task.{name}", getattr(self, name), low)
        if self.method == "given" and self.collisions == "reassign":
            raise ValueError(
                "task.collisions=reassign needs to know which codes are near, and given IDs do not say: "
                "set task.collisions to suffix or keep"
            )


class SidBuildTask:
    """See `recipes.work.Work` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {"task": SidBuildConfig, "data": SequencesConfig}
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: SidBuildConfig, model: Any, data: SequencesConfig, seed: int
    ) -> None:
        del model, seed
        self.config, self.data = task, Data(data)
        self._report: dict[str, Any] = {}

    def check(self) -> None:
        """Read sequences and items."""
        assert self.data.sequences.num_items == len(self.data.items.names)

    def describe(self) -> dict[str, str]:
        """Data and method."""
        config = self.config
        how = f"{config.method}, {config.levels} levels of {config.codes} codes"
        return {
            **self.data.describe(),
            "ids": config.method if config.method in ("given", "items") else how,
            "collisions": f"{config.collisions}, at most {config.cap} items an ID",
        }

    def work(
        self, folder: Path, device: torch.device, stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Write `sids.parquet`, `sid_report.json` and the manifest, unless they are there."""
        inputs = self.data.inputs | {"items": self.data.items.fingerprint}
        settings = asdict(self.config)
        if not is_done(folder, STAGE, inputs, settings):
            ids, found = self._build(device)
            if broadcast(stopping()):
                return None
            if dist.get_rank() == 0:
                write_ids(folder, ids, self.data.items.names)
                write_atomically(folder / REPORT, json.dumps(found, indent=1).encode())
                write_manifest(folder, STAGE, inputs, settings, [NAME, REPORT])
            broadcast(None)  # nobody goes on before it is written
        self._report = json.loads((folder / REPORT).read_text())
        names = (
            "ids",
            "collision_rate",
            "collision_rate_before",
            "items_of_fullest_id",
            "neighbours",
        )
        return {name: float(self._report[name]) for name in names if name in self._report}

    def _build(self, device: torch.device) -> tuple[SemanticIds, dict[str, Any]]:
        config, items = self.config, self.data.items
        features_ID: Tensor | None = None
        if config.method == "items":
            codes_IL = np.arange(len(items.names), dtype=np.int64)[:, None]
            ids = make_ids(codes_IL, [len(items.names)])
            return ids, report(codes_IL, codes_IL, ids.sizes, items, None, config.seed)
        if config.method == "given":
            before_IL = items.given_codes()
            sizes = list(collisions.sizes_of(before_IL))
            collisions.check_distinct(before_IL)
            codes_IL = before_IL
        else:
            sizes = [config.codes] * config.levels
            weights = (config.features, config.cooccurrence, config.empty_text)
            features_ID = item_features(items, self.data.split, *weights, config.seed)
            quantized = self._quantize(features_ID, sizes, device)
            before_IL = codes_IL = quantized.codes_IL.numpy()
            collisions.check_distinct(before_IL)
        popularity_I = self.data.split.popularity()
        if config.collisions == "keep":
            codes_IL = collisions.keep(codes_IL, config.cap)
        elif config.collisions == "suffix":
            codes_IL, more = collisions.suffix(codes_IL, popularity_I, config.cap)
            sizes.append(more)
        else:
            codes_IL = collisions.reassign(
                codes_IL, quantized.left_ID, quantized.centers[-1], config.cap
            )
        ids = make_ids(codes_IL, sizes, popularity_I)
        return ids, report(before_IL, codes_IL, ids.sizes, items, features_ID, config.seed)

    def _quantize(self, x_ID: Tensor, sizes: list[int], device: torch.device) -> Quantized:
        config = self.config
        if config.method == "kmeans":
            return residual_kmeans(x_ID, sizes, config.seed)
        return rqvae(
            x_ID.to(device),
            sizes,
            config.seed,
            config.rqvae_steps,
            config.rqvae_batch,
            config.rqvae_lr,
        )

    def panels(self) -> list[dict[str, Any]]:
        """How codes are used, level by level."""
        if not self._report:
            return []
        columns = ["codes", "used", "perplexity", "gini", "largest_load"]
        levels = self._report["levels"]
        quality = {**self._report, **self._report.get("jaccard", {})}
        rows = [[k, v] for k, v in quality.items() if isinstance(v, int | float)]
        return [
            {
                "title": "Use of codes",
                "kind": "table",
                "about": "Perplexity: as many codes, evenly used, would be as hard to guess.",
                "columns": ["level", *columns],
                "rows": [[n + 1, *(row[name] for name in columns)] for n, row in enumerate(levels)],
            },
            {
                "title": "Semantic IDs",
                "kind": "table",
                "columns": ["figure", "value"],
                "rows": rows,
            },
        ]
