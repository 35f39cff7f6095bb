"""The `data` node of SLIDE's stages: sequences of items, and what is known of the items."""

from dataclasses import dataclass, field

from configs.values import at_least, one_of

SOURCES = ("movielens", "files", "sequences", "algr", "planted")
SHORT_USERS = ("error", "drop")


@dataclass(kw_only=True)
class SequencesConfig:
    """Where sequences and items come from."""

    source: str = "movielens"
    """movielens: MovieLens-100K; files: tables of your own; sequences: a folder with sequences.txt;
    algr: FORGE's prompts; planted: made up, with a known structure."""
    folder: str | None = None
    """Of MovieLens-100K (null: inside the package recbole), or with sequences.txt, items.jsonl or
    movies.dat, and events.parquet where times are known."""
    files: list[str] = field(default_factory=list)
    """Globs of .parquet, .csv or .jsonl tables with a row for each interaction (sources files, algr)."""
    user_key: str = "user"
    """The column that says who."""
    item_key: str = "item"
    """The column that says what they met; in tables of items, too."""
    time_key: str | None = "time"
    """The column of whole seconds; null: a user's rows are in their order, and no times are known."""
    behaviour_key: str | None = None
    """A column that says what kind of interaction it was."""
    behaviours: list[str] = field(default_factory=list)
    """Only interactions of these kinds are read; empty: all."""
    sort: bool = False
    """Sort each user's rows by time; false: times that go back are an error."""
    items: list[str] = field(default_factory=list)
    """Globs of tables with a row for each item (source files)."""
    text_keys: list[str] = field(default_factory=lambda: ["title", "keyphrase", "categories"])
    """Columns of items that are text; those that a table lacks are passed over."""
    attributes_key: str | None = "attributes"
    """A column of items with lists of names, if the tables have it."""
    vector_key: str | None = None
    """A column of items with lists of numbers, equally many for all."""
    ids_key: str | None = None
    """A column of items with ready semantic IDs: lists of whole numbers, or of words such as <a_17>."""
    short_users: str = "error"
    """What happens to users with fewer than three interactions: error or drop."""
    permute_ties: int | None = None
    """A control: a user's interactions of the same second, in an order that this seed draws."""
    planted_users: int = 600
    """Users of the made-up set (source planted)."""

    def __post_init__(self) -> None:
        one_of("data.source", self.source, SOURCES)
        one_of("data.short_users", self.short_users, SHORT_USERS)
        if self.source in ("files", "algr") and not self.files:
            raise ValueError(
                "data.files is empty: set data.files to globs of tables, such as "
                "'data.files=[clicks/*.parquet]'"
            )
        if self.source == "sequences" and self.folder is None:
            raise ValueError("data.folder is null: set data.folder to a folder with sequences.txt")
        if self.behaviours and self.behaviour_key is None:
            raise ValueError(
                f"data.behaviours={self.behaviours} chooses kinds of interactions: set "
                "data.behaviour_key to the column that says them"
            )
        at_least("data.planted_users", self.planted_users, 50)
