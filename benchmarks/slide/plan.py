"""What a study trains and how long: sizes, steps and the levers, the same for all seeds of a set."""

from dataclasses import dataclass, field, replace

from models.slide.config import SlideConfig
from trainer.optim import OptimConfig


@dataclass(frozen=True)
class Teaching:
    """How teachers are trained; of several, validation chooses (`benchmarks.slide trials`)."""

    weight_decay: float = 0.1
    beta: float = 0.95
    """Of the second moment."""
    lr: float = 1e-3
    dropout: float = 0.3
    tied: bool = True
    """See `SlideConfig`; students have it as their teachers do."""
    by_target: bool = False
    """See `benchmarks.slide.fleet.Member`."""

    @property
    def optim(self) -> OptimConfig:
        """Of a teacher."""
        return OptimConfig(
            lr=self.lr, betas=[0.9, self.beta], weight_decay=self.weight_decay, warmup=100,
            schedule="cosine", final=0.0,
        )  # fmt: skip


TEACHINGS = {
    "batches": Teaching(),
    "targets": Teaching(by_target=True),
    "untied": Teaching(by_target=True, tied=False),
    "adamw": Teaching(by_target=True, weight_decay=0.01, beta=0.999),
    "untied-adamw": Teaching(by_target=True, tied=False, weight_decay=0.01, beta=0.999),
    "dropout": Teaching(by_target=True, tied=False, weight_decay=0.01, beta=0.999, dropout=0.4),
    "slow": Teaching(by_target=True, tied=False, weight_decay=0.01, beta=0.999, lr=5e-4),
}
"""`batches` is what the first study had. The others weigh each target alike, have a table of their own
for what is predicted, or AdamW with torch's defaults, in turn and together."""


@dataclass(frozen=True)
class Learning:
    """How students are trained; of several, validation chooses (`benchmarks.slide students`)."""

    epochs: float = 40
    """Over the training prefixes; copies are extra rows, not extra steps."""
    lr: float = 5e-4
    dropout: float = 0.15
    copies: int = 0
    """Of each history, with items left out (`beam_export`)."""

    @property
    def optim(self) -> OptimConfig:
        """Of a student."""
        return OptimConfig(lr=self.lr, warmup=100, schedule="cosine", final=0.0)


LEARNINGS = {
    "short": Learning(epochs=16),
    "short with copies": Learning(epochs=16, copies=1),
    "long": Learning(),
    "long with copies": Learning(copies=1),
    "long, fast": Learning(lr=1e-3),
    "long, dropout": Learning(dropout=0.3),
    "long, fast, dropout": Learning(lr=1e-3, dropout=0.3),
}
"""`short with copies` is what the first studies had: their students were best at the last step."""


@dataclass(frozen=True)
class Reinforcement:
    """How a student's lists are reinforced; of several ways, validation chooses."""

    lr: float = 3e-5
    schedule: str = "cosine"
    steps: int = 300
    batch: int = 128
    """Histories of a step, each with a group of lists."""
    credit: str = "place"
    ndcg: float = 0.0
    overlap: float = 1.0
    graded: float = 0.0
    ends: bool = False
    """On whole training parts of users who are not evaluated, instead of on training prefixes: there the
    student has not seen the lists, nor the teachers the item that follows."""

    @property
    def optim(self) -> OptimConfig:
        """Of a student."""
        return OptimConfig(lr=self.lr, warmup=20, schedule=self.schedule, final=0.1)


FIRST = Reinforcement(
    lr=1e-5, schedule="constant", batch=64, credit="list", ndcg=1.0, overlap=0.5
)  # fmt: skip
REINFORCEMENTS = {
    "first": FIRST,
    "overlap": Reinforcement(),
    "overlap, fast": Reinforcement(lr=1e-4),
    "overlap and target": Reinforcement(ndcg=1.0),
    "scores": Reinforcement(overlap=0.0, graded=1.0),
    "ends": Reinforcement(ends=True),
    "ends, fast": Reinforcement(ends=True, lr=1e-4),
    "ends, scores": Reinforcement(ends=True, overlap=0.0, graded=1.0),
}
"""`first` is what the first studies had: it did not help."""


@dataclass(frozen=True)
class Plan:
    """See the fields."""

    sizes: dict[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"s": (256, 4, 4), "m": (256, 8, 4)}
    )
    """Hidden size, layers, heads."""
    teachers: dict[str, tuple[str, str, int]] = field(
        default_factory=lambda: {
            "s": ("s", "steps", 0),
            "h": ("s", "heads", 0),
            "h2": ("s", "heads", 100),
            "m": ("m", "heads", 0),
            "m2": ("m", "heads", 100),
            "sasrec": ("s", "items", 0),
        }
    )
    """Size, kind of codes, and what is added to the seed. Students begin with `s` or `h`; of those with
    heads and all, the ensemble is what is best on validation. Of the kind `items` each item is a code of
    its own: SASRec with full cross-entropy, only compared with."""
    folds: int = 0
    """More teachers like `h`, each without a fold of the users, for the student `cross_heads`."""
    students: tuple[str, ...] = ("heads", "steps", "direct_heads", "direct_steps", "weak_heads")
    """`heads` and `steps` learn the ensemble's lists with counts; `weak_` those of the model that they
    begin with, `cross_` those of models that did not train on the list's user; `direct_` what users went
    on to meet; `shuffled_` the ensemble's in a random order, `plain_` without copies, if there are any,
    `log_` with less weight on later places, `ends_` those of whole training parts, too, of users who are
    not evaluated."""
    teacher_epochs: float = 40
    teacher_batch: int = 256
    student_batch: int = 512
    teaching: Teaching = field(default_factory=lambda: TEACHINGS["targets"])
    shorter: float = 1.0
    """Students train for this share of `learning.epochs`: of a set with many prefixes."""
    learning: Learning = field(default_factory=lambda: LEARNINGS["short with copies"])
    reinforcements: dict[str, Reinforcement] = field(default_factory=lambda: {"first": FIRST})
    """Of several, the best one on validation is compared."""
    max_history: int = 20
    beams: int = 50
    length: int = 10
    newest: int | None = None
    """Of each user, so many prefixes at most."""
    alphas: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Weights of the counts; the best one on validation."""
    evaluations: int = 10
    patience: float = 0.3
    """No evaluation in this share of the steps at first."""
    eval_users: int = 6144
    """Of validation, on which the best checkpoint is chosen."""
    batch: int = 2048
    """Users that are decoded together."""

    def model(
        self, size: str, codes: str, list_length: int = 0, dropout: float = 0.3
    ) -> SlideConfig:
        """One of the models."""
        hidden, layers, heads = self.sizes[size]
        return SlideConfig(
            hidden_size=hidden, num_layers=layers, num_heads=heads, dropout=dropout,
            max_history=self.max_history, codes="steps" if codes == "items" else codes,
            list_length=list_length, tied=self.teaching.tied,
        )  # fmt: skip


LEAN = replace(
    Plan(),
    teachers={k: v for k, v in Plan().teachers.items() if k not in ("m2", "sasrec")},
    students=("heads", "direct_heads", "weak_heads"),
)
TINY = Plan(
    sizes={"s": (16, 1, 2), "m": (16, 2, 2)}, teacher_epochs=2, teacher_batch=16, student_batch=64,
    shorter=1 / 16, max_history=6, beams=12, evaluations=2, patience=0.0, eval_users=40,
    reinforcements={"first": replace(FIRST, steps=2, batch=4)}, batch=64, folds=2,
    students=("heads", "steps", "direct_heads", "weak_heads", "cross_heads", "shuffled_heads",
              "plain_heads", "ends_heads"),
)  # fmt: skip
"""For tests, and to see whether a machine is ready."""
PLANS = {
    "full": Plan(),
    "first": replace(LEAN, teachers=Plan().teachers, students=(*LEAN.students, "plain_heads")),
    "lean": LEAN,
    "many": replace(LEAN, newest=12, teacher_epochs=30, shorter=0.4),
    "long": replace(LEAN, newest=20, teacher_epochs=10, shorter=0.4, eval_users=3020),
    "levers": replace(
        LEAN, students=("heads", "log_heads", "shuffled_heads", "ends_heads"), reinforcements={}
    ),
    "cross": replace(LEAN, folds=2, students=("weak_heads", "cross_heads"), reinforcements={}),
    "tiny": TINY,
}
"""`first`: of a set's first seed, without students of the slower kind, `lean`: of further seeds; `many`,
`long`: for many users, for long histories; `levers`: what a student's lists are like; `cross`: a student
of teachers that did not train on its lists' users, beside one of a teacher that did."""
