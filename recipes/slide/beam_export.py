"""Stage `beam_export`: for every training prefix, the list that beam search of the teachers finds.

Rows are dealt into shards by a hash, and ranks take shards in turn. A shard is a file that is absent or
whole, so a run that was stopped or killed goes on with the shards that are missing, on any number of
ranks. Which rows are searched together depends on the shard alone: lists do not depend on the ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import MISSING

from collectives.host import all_sum, broadcast, gather_objects
from configs.values import at_least
from models.slide.decode import beam_search
from models.slide.history import NOTHING, pad_left
from models.slide.trie import Trie, build_trie
from recipes.interactions.tables import Ints
from recipes.slide.artefacts import is_done, write_manifest
from recipes.slide.config import SequencesConfig
from recipes.slide.counts import COOCCURRENCE, Counts
from recipes.slide.data import Data
from recipes.slide.prefixes import Prefixes
from recipes.slide.shards import (
    Rows,
    file_of,
    made_from_text,
    read_shards,
    shard_is_there,
    write_shard,
)
from recipes.slide.teachers import Teachers
from recipes.slide.users import Users

STAGE = "beam_export"
TOPS = (1, 10, 50)


@dataclass(kw_only=True)
class BeamExportConfig:
    """The `task` node."""

    name: str = STAGE
    sids: str = MISSING
    """The folder of `sid_build`."""
    teachers: list[str] = field(default_factory=list)
    """Exported folders of `gr_train`. Several: the mean of their log-probabilities. Models of folds are
    asked only about users that they did not train on."""
    beams: int = 50
    """And items of a list."""
    newest: int | None = None
    """Only the newest so many prefixes of each user; null: all."""
    ends: bool = False
    """Also each user's whole training part: what follows is held out, so no teacher remembers it, and no
    row has it. A student then knows lists of the very histories that validation asks about."""
    copies: int = 0
    """For each prefix, so many more with items left out."""
    drop: float = 0.2
    """Share of the items that copies lack."""
    counts: float = 0.0
    """Reorder lists by the score plus this times log(1 + count of the item after the last three); pairs
    of the row's own user do not count."""
    shards: int = 256
    """Files that the lists are dealt into."""
    batch_size: int = 256
    """Histories that are searched together."""
    validation_users: int = 2000
    """On so many users' validation targets the teachers are compared with what they know of training."""

    def __post_init__(self) -> None:
        for name in ("beams", "shards", "batch_size"):
            at_least(f"task.{name}", getattr(self, name), 1)
        if self.newest is not None:
            at_least("task.newest", self.newest, 1)
        for name in ("copies", "counts", "validation_users"):
            at_least(f"task.{name}", getattr(self, name), 0)
        if not 0 <= self.drop < 1:
            raise ValueError(f"task.drop={self.drop}: set task.drop to 0 or more, below 1")


class BeamExportTask:
    """See `recipes.work.Work` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {"task": BeamExportConfig, "data": SequencesConfig}
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: BeamExportConfig, model: Any, data: SequencesConfig, seed: int
    ) -> None:
        del model, seed
        if not task.teachers:
            raise ValueError("task.teachers is empty: set task.teachers to exported folders")
        self.config, self.data = task, Data(data, task.sids)
        self._ranks: dict[str, Ints] = {}

    def check(self) -> None:
        """Load the teachers, and compare them with data and IDs."""
        self._teachers(torch.device("cpu"))

    def _teachers(self, device: torch.device) -> Teachers:
        return Teachers.load(self.config.teachers, "task.teachers", self.data, device)

    def describe(self) -> dict[str, str]:
        """Data, teachers, lists."""
        config = self.config
        split = self.data.split
        prefixes = Prefixes(split, 1, config.copies, 0.0, 1, config.newest, config.ends)
        lists = len(prefixes.rows[0])
        return {
            **self.data.describe(),
            "teachers": ", ".join(config.teachers),
            "lists": f"{lists:,} of {config.beams} items in {config.shards} shards"
            + (f"; counts weigh {config.counts:g}" if config.counts else ""),
        }

    def work(
        self, folder: Path, device: torch.device, stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Write the shards that are missing, then the manifest."""
        teachers = self._teachers(device)
        settings = {k: v for k, v in asdict(self.config).items() if k not in ("sids", "teachers")}
        inputs = {**self.data.inputs, "teachers": teachers.fingerprint}
        search = Search(self.config, self.data, teachers, device)
        if not is_done(folder, STAGE, inputs, settings):
            made_from = made_from_text({**inputs, "settings": settings})
            shards = range(self.config.shards)
            there = [shard_is_there(folder, shard, made_from) for shard in shards]
            missing = [shard for shard in shards if not there[shard]]
            broadcast(None)  # nobody writes before all have looked
            whole = True
            for shard in missing[dist.get_rank() :: dist.get_world_size()]:
                rows = search.shard(shard, stopping)
                if rows is None:
                    whole = False
                    break
                write_shard(folder, shard, rows, made_from)
            if all_sum([float(not whole)])[0]:
                return None
            if dist.get_rank() == 0:
                files = [str(file_of(folder, shard).relative_to(folder)) for shard in shards]
                write_manifest(folder, STAGE, inputs, settings, files)
            broadcast(None)
        validation = search.validation(self.config.validation_users)
        self._ranks = {"validation": validation}
        if dist.get_rank() == 0:
            rows = read_shards(folder, self.config.shards, self.config.beams)
            asked = (rows.copies_R == 0) & (rows.targets_R != NOTHING)
            self._ranks["training"] = rows.target_ranks[asked]
        return self._figures()

    def _figures(self) -> dict[str, float]:
        """The share of targets in the first items of a list: in training more, if teachers remember."""
        return {
            f"{part}_target_in_top{top}": float(((ranks >= 0) & (ranks < top)).mean())
            for part, ranks in sorted(self._ranks.items())
            for top in TOPS
            if top <= self.config.beams and len(ranks)
        }

    def panels(self) -> list[dict[str, Any]]:
        """Where the targets are in the lists."""
        figures = self._figures()
        if "training" not in self._ranks:
            return []
        tops = [top for top in TOPS if top <= self.config.beams]
        return [
            {
                "title": "Targets in the teachers' lists",
                "kind": "table",
                "about": "Far more in training than in validation: the teachers remember their targets.",
                "columns": ["part", "lists", *(f"in the first {top}" for top in tops)],
                "rows": [
                    [part, len(r), *(figures.get(f"{part}_target_in_top{top}") for top in tops)]
                    for part, r in self._ranks.items()
                ],
            }
        ]


class Search:
    """Beam search for rows of training prefixes and for users of validation."""

    def __init__(
        self, config: BeamExportConfig, data: Data, teachers: Teachers, device: torch.device
    ) -> None:
        self.config, self.data, self.teachers, self.device = config, data, teachers, device
        self.trie: Trie = build_trie(data.ids, device)
        self.prefixes = Prefixes(
            data.split,
            teachers.max_history,
            config.copies,
            config.drop,
            config.shards,
            config.newest,
            config.ends,
        )
        self.group_of_user = teachers.groups(list(data.sequences.user_names))

    @cached_property
    def counts(self) -> Counts:
        """Co-occurrence."""
        return Counts(self.data.split, *COOCCURRENCE)

    def shard(self, shard: int, stopping: Callable[[], bool]) -> Rows | None:
        """The rows of a shard; None if asked to stop."""
        return self.rows(self.prefixes.of_shard(shard), stopping)

    def rows(self, rows: Ints, stopping: Callable[[], bool]) -> Rows | None:
        """These of the prefixes, by group of teachers, with their lists; None if asked to stop."""
        users, targets, copies = self.prefixes.rows
        rows = rows[np.argsort(self.group_of_user[users[rows]], kind="stable")]
        histories = [self.prefixes.history(row) for row in rows.tolist()]
        found = self._lists(users[rows], histories, stopping, own_pairs=False)
        if found is None:
            return None
        known = self.prefixes.targets(rows)
        return Rows(users[rows], targets[rows], copies[rows], histories, known, *found)

    def validation(self, limit: int) -> Ints:
        """Places of the validation targets of the first users of every rank's share, over all ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        users = Users(self.data.split, "validation", self.teachers.max_history)
        mine = np.arange(min(limit, len(users)))[rank::ranks]
        mine = mine[np.argsort(self.group_of_user[mine], kind="stable")]
        each = [users[number] for number in mine.tolist()]
        found = self._lists(mine, [user.history for user in each], lambda: False, own_pairs=True)
        assert found is not None
        hit_RK = found[0] == np.array([user.target for user in each])[:, None]
        places = np.where(hit_RK.any(1), hit_RK.argmax(1), -1)
        return np.concatenate(gather_objects(places))

    def _lists(
        self, users_R: Ints, histories: list[Ints], stopping: Callable[[], bool], own_pairs: bool
    ) -> tuple[Ints, Any] | None:
        """Items and scores (R, K); rows of one group of teachers follow each other."""
        K, size = self.config.beams, self.config.batch_size
        items_RK = np.full((len(histories), K), NOTHING, dtype=np.int64)
        scores_RK = np.full((len(histories), K), -np.inf, dtype=np.float32)
        groups_R = self.group_of_user[users_R]
        for group in np.unique(groups_R):
            of_group = np.flatnonzero(groups_R == group)
            models = [exported.model for exported in self.teachers.of_group(int(group))]
            for begin in range(0, len(of_group), size):
                if stopping():
                    return None
                rows = of_group[begin : begin + size]
                padded = pad_left([histories[row] for row in rows], self.teachers.max_history)
                padded = padded.to(self.device)
                found = beam_search(models, self.trie, padded, K, padded[:, :0])
                width = found.items_BK.shape[1]
                items_RK[rows, :width] = found.items_BK.cpu().numpy()
                scores_RK[rows, :width] = found.scores_BK.float().cpu().numpy()
        if self.config.counts and len(histories):
            return self._reordered(users_R, histories, items_RK, scores_RK, own_pairs)
        return items_RK, scores_RK

    def _reordered(
        self, users_R: Ints, histories: list[Ints], items_RK: Ints, scores_RK: Any, own_pairs: bool
    ) -> tuple[Ints, Any]:
        """By score and counts together, which become the score."""
        lasts_RW = pad_left(histories, self.counts.last).numpy()
        counts_RK = self.counts.after(
            lasts_RW, items_RK, None if own_pairs else users_R, self.device
        )
        scores_RK = (scores_RK + self.config.counts * np.log1p(counts_RK)).astype(np.float32)
        order = np.argsort(-scores_RK, axis=1, kind="stable")
        return np.take_along_axis(items_RK, order, 1), np.take_along_axis(scores_RK, order, 1)
