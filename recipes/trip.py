"""TRIP: will this user click on this item now, given what they did before and when?"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.cost import training_flops
from models.trip.history import PADDING, UNSEEN, Grouping, quantile_edges, time_edges
from models.trip.model import Output, Trip, init_weights
from models.trip.reconstruction import Candidates, Urn, choose_masked
from models.trip.serve import Read, write_folder
from models.trip.table import ItemTable
from recipes.ctr import figures, words
from recipes.ctr.batches import View
from recipes.ctr.config import InteractionsConfig
from recipes.ctr.panels import ClickPanels, looks
from recipes.ctr.planted import plant
from recipes.ctr.samples import Clicks, Sample
from recipes.ctr.start import item_vectors
from recipes.ctr.table import Interactions, read_movielens, read_tables
from recipes.ctr.targets import Split, Targets, split
from recipes.interactions.tables import Ints
from recipes.task import Batch

INPUTS = ("items_BN", "behaviours_BN", "ages_BN", "buckets_BN", "groups_BN", "targets_B")
"""What the model reads of a batch, in its order."""
FEATURES = ("features_BNF", "target_features_BF")
"""And what it reads of items' features."""
EDGE_SAMPLES = 5000
"""So many training histories, evenly spread, decide where temporal groups begin."""


@dataclass(kw_only=True)
class TripTaskConfig:
    """The `task` node."""

    name: str = "trip"


class TripTask:
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": TripTaskConfig,
        "model": TripConfig,
        "data": InteractionsConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: Any, model: TripConfig, data: InteractionsConfig, seed: int
    ) -> None:
        del task, seed
        self.model_config, self.data_config = model, data

    @cached_property
    def table(self) -> Interactions:
        """Read when first needed."""
        config = self.data_config
        if config.source == "planted":
            return plant(config.planted_users, seed=0)
        if config.source == "movielens":
            return read_movielens(config.folder, config.positive_from)
        return read_tables(config)

    @cached_property
    def parts(self) -> Split:
        """Targets of training, validation and test."""
        return split(self.table, self.data_config)

    @cached_property
    def grouping(self) -> Grouping:
        """Where temporal groups begin."""
        model = self.model_config
        if model.session_gap:
            return Grouping(gap=model.session_gap, sessions=model.groups)
        if model.group_edges:
            return Grouping(tuple(model.group_edges))
        train = self.train_samples()
        chosen = range(0, len(train), -(-len(train) // EDGE_SAMPLES))
        ages = [train[row].ages_n for row in chosen]
        return Grouping(quantile_edges(np.concatenate(ages), model.groups))

    @cached_property
    def time_edges(self) -> Ints:
        """The ages at which time buckets begin."""
        model = self.model_config
        return time_edges(model.time_unit, model.time_octaves, model.time_fine)

    @cached_property
    def view(self) -> View:
        """What the model sees of a history."""
        return View(self.model_config.max_history, self.grouping, self.time_edges)

    def check(self) -> None:
        """Read the table, split it, and draw what is no click."""
        self.build_model()

    def build_model(self) -> nn.Module:
        """On the meta device."""
        with torch.device("meta"):
            return Trip(
                self.model_config,
                self.parts.num_items,
                len(self.table.behaviour_names),
                self.grouping.count,
                int(self.table.features_IF.max(initial=0)),
            )

    def tables(self, model: nn.Module) -> list[nn.Module]:
        """The item table."""
        return [module for module in model.modules() if isinstance(module, ItemTable)]

    def init_weights(self, module: nn.Module) -> None:
        """See `models.trip.model.init_weights`, and `recipes.ctr.start`."""
        init_weights(module)
        if isinstance(module, ItemTable) and self.model_config.item_start == "counts":
            with torch.no_grad():
                module.rows_VD[UNSEEN + 1 :] = torch.from_numpy(self.item_vectors)

    @cached_property
    def item_vectors(self) -> NDArray[np.float32]:
        """Where the item table begins, if not at random."""
        D, folder = self.model_config.hidden_size, self.data_config.cache_dir
        return item_vectors(self.table, self.parts, D, folder)

    def weights_folder(self) -> Path | None:
        """Always from the start."""
        return None

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
        """Names agree."""
        return {name: name for name in stored}

    def clicks(self, targets: Targets) -> Clicks:
        """Targets with their histories."""
        return Clicks(self.table, targets, self.parts.vocabulary_I, self.model_config.max_history)

    def train_samples(self) -> Clicks:
        """Training targets."""
        return self.clicks(self.parts.train)

    @cached_property
    def evaluated(self) -> Clicks:
        """Validation targets, then test targets."""
        return self.clicks(self.parts.validation.followed_by(self.parts.test))

    def eval_samples(self) -> Clicks:
        """Validation targets, then test targets, each by time."""
        return self.evaluated

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Histories padded on the left, as whole numbers."""
        return self.view.collate(samples)

    def at_once(self, clicks: Clicks, rows: Ints) -> dict[str, Any]:
        """What `collate` gives of these samples, made all together."""
        return self.view.at_once(clicks, rows)

    def count(self, batch: Batch) -> int:
        """Targets."""
        return int(batch["count"])

    @cached_property
    def urn(self) -> Urn | None:
        """Where candidates for hidden items come from; None where that is the whole catalogue.

        Every interaction that training may count is in it, and every item once more.
        """
        parts, few = self.parts, 2 * self.model_config.reconstruction_candidates
        if not UNSEEN + 1 < parts.num_items > few > 0:
            return None
        met = parts.vocabulary_I[self.table.items_E[parts.known_E]]
        every = np.arange(UNSEEN + 1, parts.num_items)
        return Urn.of(torch.from_numpy(np.concatenate([met[met > UNSEEN], every])))

    def _candidates(self, device: torch.device) -> Candidates | None:
        """What hidden items of a batch are told from in training; None: all items."""
        if not self.model_config.reconstruction or self.urn is None:
            return None
        if self.urn.items_U.device != device:  # once: a step that is recorded must not copy
            self.urn = Urn(*(x.to(device) for x in self.urn))
        return self.urn.draw(self.model_config.reconstruction_candidates)

    def _forward(
        self,
        model: nn.Module,
        batch: Batch,
        masked_RM: Tensor | None,
        candidates: Candidates | None = None,
    ) -> tuple[Output, Tensor]:
        """What the model gives, and the reconstruction loss of histories of which some is hidden."""
        features = (batch.get(name) for name in FEATURES)
        out: Output = model(*(batch[name] for name in INPUTS), masked_RM, candidates, *features)
        return out, torch.zeros_like(out.logits_B) if out.nats_R is None else out.nats_R

    def _masked(self, batch: Batch, priority_RN: Tensor) -> Tensor | None:
        """Which items of the first R histories are hidden."""
        if not self.model_config.reconstruction:
            return None
        R, share = len(priority_RN), self.model_config.masked_share
        known_RN = batch["items_BN"][:R] > UNSEEN
        return choose_masked(batch["groups_BN"][:R], known_RN, share, priority_RN)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the clicks, plus the weighted reconstruction loss, summed over targets."""
        B, N = batch["items_BN"].shape
        R = math.ceil(B * self.model_config.reconstruction_rows)
        device = batch["items_BN"].device
        masked_RM = self._masked(batch, torch.rand(R, N, device=device))
        out, nats_R = self._forward(model, batch, masked_RM, self._candidates(device))
        clicks = nn.functional.binary_cross_entropy_with_logits(
            out.logits_B.float(), batch["labels_B"], reduction="sum"
        )
        return clicks + self.model_config.reconstruction * nats_R.sum() * B / R

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The log-odds of a click on each target, (B,)."""
        return self._forward(model, batch, None)[0].logits_B

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Every target's score at its own place, and where the head looks."""
        rows_B, groups_BN = batch["rows_B"], batch["groups_BN"]
        place_N = torch.arange(groups_BN.shape[1], device=rows_B.device)
        # the same items are hidden in every evaluation, on any number of ranks
        priority_BN = (rows_B[:, None] * 7919 + place_N * 104_729) % 10_007 / 10_007
        masked_BM = self._masked(batch, priority_BN)
        out, nats_B = self._forward(model, batch, masked_BM)
        scores = torch.zeros(len(self.evaluated), dtype=torch.float64, device=rows_B.device)
        sums: dict[str, Tensor | float] = {
            "scores": scores.index_add(0, rows_B, out.logits_B.double()),
            "scored": torch.zeros_like(scores).index_add(
                0, rows_B, torch.ones_like(out.logits_B).double()
            ),
        }
        if masked_BM is not None:
            sums["reconstruction"] = nats_B.sum()
            sums["reconstructed"] = (masked_BM >= 0).any(1).sum()
        return sums | looks(
            out.weights_BN,
            batch["items_BN"] != PADDING,
            groups_BN,
            batch["buckets_BN"] // self.model_config.time_fine,
            self.grouping.count,
            self.model_config.time_octaves,
        )

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """AUC and its kin of validation, and with `_test` behind them those of the test part."""
        scored = sums["scored"].numpy()
        assert set(np.unique(scored)) <= {0, 1}, "a target was scored twice"
        logits, clicks = sums["scores"].numpy(), self.evaluated
        items_T, users_T = clicks.targets.items_T, self.table.users_E[clicks.targets.events_T]
        popularity = figures.popularity(self.parts.train, items_T, len(self.table.item_names))
        parts = {"": self.parts.validation, "_test": self.parts.test}
        found = figures.by_part(parts, scored, logits, users_T, popularity)
        if "reconstruction" in sums:
            found["reconstruction"] = sums["reconstruction"] / max(sums["reconstructed"], 1)
        self._panels.keep(found, clicks, np.flatnonzero(scored), logits, sums)
        return found

    @cached_property
    def _panels(self) -> ClickPanels:
        return ClickPanels(figures.group_names(self.grouping), self.model_config.time_unit)

    def panels(self) -> list[dict[str, Any]]:
        """AUC by time and by length, where the head looks, and the comparison with popularity."""
        return self._panels.panels()

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """None."""

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """Weights, and what turns a request into whole numbers, for `models.trip.serve`."""
        del options
        vocabulary = {
            str(name): int(number)
            for name, number in zip(self.table.item_names, self.parts.vocabulary_I, strict=True)
        }
        behaviours = {str(name): n + 1 for n, name in enumerate(self.table.behaviour_names)}
        features = {}
        if self.table.features_IF.size:
            features = dict(zip(vocabulary, self.table.features_IF.tolist(), strict=True))
        write_folder(
            out, model, read, self.model_config, vocabulary, behaviours, self.grouping, features
        )
        return f"{len(vocabulary):,} items"

    def flops(self, batch: Batch) -> float:
        """See `models.trip.cost`."""
        return float(batch["count"]) * training_flops(self.model_config, self.grouping.count)

    def describe(self) -> dict[str, str]:
        """Model, table, and targets."""
        config, source = self.model_config, self.data_config.source
        return {
            "model": f"trip, {config.token_layers}+{config.upper_layers if config.summaries else 0} "
            f"layers x {config.hidden_size}, mask {config.mask}, rank {config.rank}, "
            f"time {config.time}, {self.parts.num_items:,} items",
            "data": words.table_in_words("tables" if source == "files" else source, self.table),
            "targets": words.targets_in_words(self.parts),
            "groups": words.groups_in_words(self.view),
        }

    def show(self, sample: Sample) -> Iterator[str]:
        """The target, then the history, newest first."""
        return words.sample_in_words(sample, self.view)

    def survey(self) -> dict[str, str]:
        """What the header says, and how long histories are."""
        return {**self.describe(), "histories": words.histories_in_words(self.train_samples())}
