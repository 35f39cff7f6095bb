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
    on to meet; `shuffled_` the ensemble's in a random order, `plain_` without
    copies, if there are any, `log_` with less weight on later places."""
    teacher_epochs: float = 40
    teacher_batch: int = 256
    student_batch: int = 512
    teaching: Teaching = field(default_factory=lambda: TEACHINGS["targets"])
    shorter: float = 1.0
    """Students train for this share of `learning.epochs`: of a set with many prefixes."""
    learning: Learning = field(default_factory=lambda: LEARNINGS["short with copies"])
    rl_optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-5, warmup=20, schedule="constant")
    )
    rl_steps: int = 300
    rl_batch: int = 64
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
    shorter=1 / 16, rl_steps=2, rl_batch=4, max_history=6, beams=12, evaluations=2, patience=0.0,
    eval_users=40, batch=64, folds=2,
    students=("heads", "steps", "direct_heads", "weak_heads", "cross_heads", "shuffled_heads",
              "plain_heads"),
)  # fmt: skip
"""For tests, and to see whether a machine is ready."""
PLANS = {
    "full": Plan(),
    "first": replace(LEAN, teachers=Plan().teachers, students=(*LEAN.students, "plain_heads")),
    "lean": LEAN,
    "many": replace(LEAN, newest=12, teacher_epochs=30, shorter=0.4),
    "long": replace(LEAN, newest=20, teacher_epochs=10, shorter=0.4),
    "levers": replace(LEAN, students=("heads", "log_heads", "shuffled_heads"), rl_steps=0),
    "cross": replace(LEAN, folds=2, students=("weak_heads", "cross_heads"), rl_steps=0),
    "tiny": TINY,
}
"""`first`: of a set's first seed, without students of the slower kind, `lean`: of further seeds; `many`,
`long`: for many users, for long histories; `levers`: what a student's lists are like; `cross`: a student
of teachers that did not train on its lists' users, beside one of a teacher that did."""
