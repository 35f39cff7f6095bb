"""The `data` node of tasks on clicks: a table of interactions, and what is predicted of it."""

from dataclasses import dataclass, field

from configs.values import at_least, one_of

SOURCES = ("movielens", "files", "planted")


@dataclass(kw_only=True)
class InteractionsConfig:
    """Where interactions come from, and which of them are targets."""

    source: str = "movielens"
    """movielens: MovieLens-100K; files: tables of your own; planted: made up, with a known effect."""
    folder: str | None = None
    """Of MovieLens-100K, with u.data or ml-100k.inter in it; null: inside the package recbole."""
    files: list[str] = field(default_factory=list)
    """Globs of .parquet, .csv or .jsonl tables with a row for each interaction (source files)."""
    user_key: str = "user"
    """The column that says who."""
    item_key: str = "item"
    """The column that says what they met."""
    time_key: str = "time"
    """The column of whole seconds."""
    behaviour_key: str | None = None
    """A column that says what kind of interaction it was; known of the history, never of the target."""
    label_key: str | None = None
    """A column of numbers: a click at `positive_from` or above; where it is empty, the row is history
    only. null: every interaction is a click, and what is no click is drawn."""
    positive_from: float = 4.0
    """The smallest label that is a click."""
    uniform_negatives: int = 1
    """For each click without `label_key`: so many items drawn from all."""
    popular_negatives: int = 1
    """And so many drawn as often as others interacted with them around the same time."""
    min_count: int = 5
    """Without `label_key`, only items with so many interactions in the training part are targets."""
    negatives_seed: int = 0
    """Decides the drawn items; not `trainer.seed`, so that runs with several seeds share them."""
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
        if self.source == "files" and not self.files:
            raise ValueError(
                "data.files is empty: set data.files to globs of tables, such as "
                "'data.files=[clicks/*.parquet]'"
            )
        for name in ("uniform_negatives", "popular_negatives", "negatives_seed"):
            at_least(f"data.{name}", getattr(self, name), 0)
        at_least("data.min_count", self.min_count, 1)
        at_least("data.planted_users", self.planted_users, 100)
        for name in ("validation", "test"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(
                    f"data.{name}={getattr(self, name)}: set data.{name} between 0 and 0.5"
                )
        if self.label_key is None and not self.uniform_negatives + self.popular_negatives:
            raise ValueError(
                "all targets would be clicks: set data.label_key, or data.uniform_negatives to 1 or more"
            )

    @property
    def labelled(self) -> bool:
        """Whether the table says what is no click."""
        return self.source != "files" or self.label_key is not None
