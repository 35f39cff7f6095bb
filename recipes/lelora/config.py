"""The node `lelora`: method, adapters, what the policy may do, and how it learns."""

from dataclasses import dataclass, field

from configs.values import at_least, one_of
from models.lelora.adapter import KINDS
from models.lelora.learner import ALGOS
from models.lelora.policy import HEADS, NETS
from models.lelora.windows import WINDOWS

OWN = ("lelora", "frozen", "random")
PEFT = ("lora", "rslora", "dora", "pissa", "mica", "olora", "eva", "adalora")
STATIC = ("milora", "loraxs")
METHODS = (*OWN, *PEFT, *STATIC, "full", "head")
ACTIONS = ("rank", "scale", "window")
CREDITS = ("simpson", "path")


@dataclass(kw_only=True)
class PolicyConfig:
    """The network, and how it learns."""

    net: str = "transformer"
    """transformer (matrices see each other) or mlp (each sees the mean of all)."""
    dim: int = 64
    """Width of the network."""
    layers: int = 2
    """Layers of the network."""
    path: str | None = None
    """A policy that was trained before, to begin with; null: lelora.rank everywhere, at scale 1."""
    train: bool = True
    """Go on learning in this run."""
    algo: str = "reinforce"
    """reinforce, ppo (clipped, over the last periods) or grpo (candidates side by side)."""
    lr: float = 1e-3
    """Learning rate of the policy's Adam."""
    entropy: list[float] = field(default_factory=lambda: [0.01, 0.001])
    """Weight of the entropy at the start and at the end of the decisions."""
    hold: float = 0.97
    """Probability, at the start, that a decision leaves a matrix as it is."""
    periods: int = 8
    """Decisions that ppo remembers."""
    candidates: int = 4
    """Candidates that grpo tries at each decision."""
    horizon: int = 8
    """Steps for which it tries each."""

    def __post_init__(self) -> None:
        one_of("lelora.policy.net", self.net, NETS)
        one_of("lelora.policy.algo", self.algo, ALGOS)
        for name in ("dim", "layers", "periods", "horizon"):
            at_least(f"lelora.policy.{name}", getattr(self, name), 1)
        at_least("lelora.policy.candidates", self.candidates, 2)
        at_least("lelora.policy.lr", self.lr, 0)
        if self.dim % HEADS:
            raise ValueError(
                f"lelora.policy.dim={self.dim}: set lelora.policy.dim to a multiple of {HEADS}"
            )
        if not 0 < self.hold < 1:
            raise ValueError(
                f"lelora.policy.hold={self.hold}: set lelora.policy.hold between 0 and 1"
            )
        if len(self.entropy) != 2 or min(self.entropy) < 0:
            raise ValueError(
                f"lelora.policy.entropy={self.entropy}: set lelora.policy.entropy to two numbers of 0 "
                "or more"
            )


@dataclass(kw_only=True)
class LeloraConfig:
    """Which part of the model trains, and who decides."""

    method: str = "lelora"
    """lelora; its ablations frozen (the policy's start, for good) and random (the same choices by
    chance, at the same budget); lora, rslora, dora, pissa, mica, olora, eva, adalora (peft's);
    milora, loraxs (our
    adapters in their window, for good); full (everything trains) or head (what is new alone)."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get adapters: names, ends of names (q_proj), globs, or all-linear."""
    exclude: list[str] = field(default_factory=list)
    """Layers that get none, in the same words."""
    param: str = "dir_ab"
    """What trains of a component: dir_ab (both factors, directions first), svd_ab (both, anchored),
    left, core, or sigma."""
    rank: int = 8
    """Rows that each matrix trains at the start; they decide the budget, too."""
    alpha: float | None = None
    """LoRA's alpha, for peft's methods; null: twice lelora.rank."""
    budget: int | None = None
    """Trainable parameters of all adapters, never exceeded; null: lelora.rank for every matrix."""
    window: str = "random"
    """Components that train first: random, gaussian (random directions instead), principal, middle,
    minor or even."""
    actions: list[str] = field(default_factory=lambda: ["rank", "scale"])
    """What the policy chooses for each matrix: rank, scale (of its learning), window."""
    widths: list[int] = field(default_factory=lambda: [0, 2, 4, 8, 16])
    """Rows that a matrix may train."""
    scales: list[float] = field(default_factory=lambda: [0.625, 0.8, 1.0, 1.25, 1.6])
    """Scales that a matrix may have."""
    period: int = 100
    """Steps between decisions."""
    first: int = 100
    """Step of the first decision; the policy's choice at step 0 is none, unless it has a path."""
    until: float = 0.4
    """Share of the training after which nothing is decided."""
    max_switched: float = 0.15
    """Share of all rows that one decision may change; the budget's own cuts come on top."""
    prune_at: float = 0.3
    """Share of the training at which the budget falls, if it does."""
    prune_to: float = 1.0
    """Share of the budget that is left then; 1: it does not fall."""
    fold_rank: int = 32
    """Room for what stops training, in rows of each matrix."""
    fold_tolerance: float = 1e-3
    """Share of that which a decision may lose to make room; a switch that would lose more is refused."""
    credit: str = "simpson"
    """What a matrix did for the loss: simpson (along the period, on meta samples) or path (each step,
    by the next batch's gradient)."""
    credit_weight: float = 0.5
    """Its share in what the policy learns from; the rest is the drop of the meta loss."""
    min_reliability: float = 0.5
    """Agreement of the credit's two halves below which the policy does not learn from a period."""
    meta_share: float = 0.02
    """Share of the training samples that is set apart to judge decisions."""
    meta_samples: int = 64
    """At most so many of them are read, the same ones every time."""
    cost_weight: float = 0.0
    """How much the reward falls with the share of the budget in use."""
    switch_weight: float = 0.0
    """How much it falls with the share of matrices that were changed."""
    rollback: float = 0.02
    """Share of the meta loss that may be lost in each of two periods before the adapters go back to
    where they were."""
    population: int = 0
    """Task lelora_classify: short runs side by side from which the policy learns before this run begins;
    0: none. Their policy is kept as policy.safetensors in the run folder."""
    population_rounds: int = 8
    """How often they are run."""
    population_steps: int = 300
    """Steps of each."""
    cache_dir: str = "~/.cache/springtide"
    """Where decompositions are kept; on many nodes, a folder that every node sees or its own."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    def __post_init__(self) -> None:
        one_of("lelora.method", self.method, METHODS)
        if self.method == "milora":
            self.param, self.window = "svd_ab", "minor"
        if self.method == "loraxs":
            self.param, self.window = "core", "principal"
        one_of("lelora.param", self.param, KINDS)
        one_of("lelora.window", self.window, WINDOWS)
        one_of("lelora.credit", self.credit, CREDITS)
        for action in self.actions:
            one_of("an entry of lelora.actions", action, ACTIONS)
        if self.population and (self.method, self.param) != ("lelora", "dir_ab"):
            raise ValueError(
                f"lelora.population={self.population} is for lelora.method=lelora, lelora.param=dir_ab, "
                f"not {self.method} and {self.param}: set lelora.population=0"
            )
        if self.population == 1 or self.population < 0:
            raise ValueError(
                f"lelora.population={self.population}: set lelora.population to 0, or 2 or more"
            )
        for name in ("rank", "period", "first", "meta_samples", "population_rounds",
                     "population_steps"):  # fmt: skip
            at_least(f"lelora.{name}", getattr(self, name), 1)
        for name in ("fold_rank", "fold_tolerance", "cost_weight", "switch_weight", "rollback"):
            at_least(f"lelora.{name}", getattr(self, name), 0)
        for name in (
            "until",
            "max_switched",
            "prune_at",
            "prune_to",
            "credit_weight",
            "meta_share",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"lelora.{name}={getattr(self, name)}: set lelora.{name} between 0 and 1"
                )
        if self.window == "gaussian" and (self.param != "dir_ab" or "window" in self.actions):
            raise ValueError(
                f"lelora.window=gaussian has directions for lelora.param=dir_ab alone, and no places: "
                f"set lelora.window=random (lelora.param={self.param}, lelora.actions={self.actions})"
            )
        if self.rank not in self.widths:
            raise ValueError(
                f"lelora.rank={self.rank} is not among lelora.widths={self.widths}: add it to "
                "lelora.widths"
            )
        if any(width < 0 for width in self.widths) or any(scale <= 0 for scale in self.scales):
            raise ValueError(
                f"lelora.widths={self.widths}, lelora.scales={self.scales}: set widths of 0 or more and "
                "scales above 0"
            )
        if 1.0 not in self.scales:
            raise ValueError(f"lelora.scales={self.scales} lacks 1.0: add it to lelora.scales")
        if self.method == "lelora" and not 0 < self.meta_share < 1:
            raise ValueError(
                f"lelora.meta_share={self.meta_share}: set lelora.meta_share between 0 and 1"
            )
