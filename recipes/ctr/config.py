"""The `data` node of tasks on clicks: a table of interactions, and what is predicted of it."""

from dataclasses import dataclass, field

from configs.values import at_least, one_of

SOURCES = ("movielens", "files", "planted")
SPLITS = ("time", "last")


@dataclass(kw_only=True)
class InteractionsConfig:
    """Where interactions come from, and which of them are targets."""

    source: str = "movielens"
    """movielens: MovieLens-100K; files: tables of your own; planted: made up, with a known effect."""
    folder: str | None = None
    """Of MovieLens-100K, with u.data or ml-100k.inter in it, null: inside the package recbole; or where
    the globs of `files` begin."""
    files: list[str] = field(default_factory=list)
    """Globs of .parquet, .csv or .jsonl tables with a row for each interaction (source files)."""
    user_key: str = "user"
    """The column that says who."""
    item_key: str = "item"
    """The column that says what they met."""
    time_key: str = "time"
    """The column of whole seconds."""
    item_feature_keys: list[str] = field(default_factory=list)
    """Columns that say more of the item, such as its category, the same in all of an item's rows. They
    are known of items that training never saw, too (source files)."""
    behaviour_key: str | None = None
    """A column that says what kind of interaction it was; known of the history, never of the target."""
    target_behaviours: list[str] = field(default_factory=list)
    """Only interactions of these kinds are targets, the others history only; empty: all are."""
    permute_ties: bool = False
    """Put what a user did in one second into a random order, decided by `negatives_seed`: where times
    are days, the table's order within one may betray something."""
    label_key: str | None = None
    """A column of numbers: a click at `positive_from` or above; where it is empty, the row is history
    only. null: every interaction is a click, and what is no click is drawn, and
    only a user's first meeting with an item is a target."""
    positive_from: float = 4.0
    """The smallest label that is a click."""
    uniform_negatives: int = 1
    """For each click without `label_key`: so many items drawn from all."""
    popular_negatives: int = 1
    """And so many drawn as often as others interacted with them around the same time."""
    near_negatives: int = 0
    """And so many that somebody met around the same time who shares an item with the user."""
    popular_window: float = 0.01
    """How far around the same time reaches: this share of all interactions, on either side. 1: any
    time, where there is no calendar."""
    min_count: int = 5
    """Without `label_key`, only items with so many interactions in the training part are targets."""
    negatives_seed: int = 0
    """Decides the drawn items; not `trainer.seed`, so that runs with several seeds share them."""
    split: str = "time"
    """time: one moment for all users; last: each user's last target tests, the one before validates."""
    validation: float = 0.1
    """Share of the targets before the last part that validates."""
    test: float = 0.1
    """Share of the targets, the latest ones, that tests."""
    planted_users: int = 6000
    """Users of the made-up set (source planted)."""
    cache_dir: str = "~/.cache/springtide"
    """Where drawn items are kept."""

    def __post_init__(self) -> None:
        one_of("data.source", self.source, SOURCES)
        one_of("data.split", self.split, SPLITS)
        if self.source == "files" and not self.files:
            raise ValueError(
                "data.files is empty: set data.files to globs of tables, such as "
                "'data.files=[clicks/*.parquet]'"
            )
        for name in ("uniform_negatives", "popular_negatives", "near_negatives", "negatives_seed"):
            at_least(f"data.{name}", getattr(self, name), 0)
        at_least("data.min_count", self.min_count, 1)
        at_least("data.planted_users", self.planted_users, 100)
        for name in ("validation", "test"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(
                    f"data.{name}={getattr(self, name)}: set data.{name} between 0 and 0.5"
                )
        if not 0 < self.popular_window <= 1:
            raise ValueError(
                f"data.popular_window={self.popular_window}: set data.popular_window above 0, at most 1"
            )
        if self.target_behaviours and self.behaviour_key is None:
            raise ValueError(
                "data.target_behaviours names kinds of interaction: set data.behaviour_key to their "
                "column"
            )
        if self.item_feature_keys and self.source != "files":
            raise ValueError(
                f"data.item_feature_keys={self.item_feature_keys} are columns of data.source=files: set "
                f"data.item_feature_keys=[] with data.source={self.source}"
            )
        drawn = self.uniform_negatives + self.popular_negatives + self.near_negatives
        if self.label_key is None and not drawn:
            raise ValueError(
                "all targets would be clicks: set data.label_key, or data.uniform_negatives to 1 or more"
            )

    @property
    def labelled(self) -> bool:
        """Whether the table says what is no click."""
        return self.source != "files" or self.label_key is not None
