"""Where each method begins, at equal trainable parameters: the same as in the recipe (a test compares).

    L matrices of one shape, M outputs, N inputs, K components, R rows

| method | rank | trains |
|---|---|---|
| lora, rslora | r | A (Kaiming), B (0); the update times 2, or times 2 sqrt(r) |
| dora | r | the same, and a length for each output, on top |
| pissa, milora | r | both factors, from the largest components, or the smallest with length 1 |
| eva | r | A (where inputs vary most), B (0) |
| mica | so that as many train | A (0) under fixed left directions of the smallest components |
| loraxs | so that as many train, and not more | a core (0) between fixed factors of the largest |
| adalora | 1.5 r, falling to r in the mean | triplets |
| frozen, random, learned | r; by chance; by a policy: at the same cost | A (random components), B (0) |
| online | r at first, then by the policy that decides during the run: at most as many | the same |
| frozen-half, learned-half | r / 2 in the mean | the same |
| full, head | | everything; only the classifier, as all the others do, too |
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.lelora.ground import Ground, in_order
from models.lelora.allocated import Allocated, Falling
from models.lelora.padded import Padded
from models.lelora.stacked import Cores, Form, Frozen, Magnitudes, Products, Rows, Whole
from models.lelora.windows import order
from recipes.lelora.adalora import GROW
from recipes.lelora.brain import Setting
from recipes.lelora.config import LeloraConfig

ALPHA = 2.0
"""LoRA's alpha over the rank."""
PEFT = ("lora", "rslora", "dora", "pissa", "milora", "mica", "eva", "adalora", "loraxs")
CHOSEN = ("random", "learned", "learned-half")
"""Widths and scales of each matrix come from a `Setting`."""
OWN = ("frozen", "frozen-half", *CHOSEN)
METHODS = (*PEFT, *OWN, "online", "full", "head")


def parameters(ground: Ground, method: str, setting: Setting | None = None) -> int:
    """What trains of the matrices and, of `full`, of everything but the classifier."""
    matrices, r = ground.base.matrices, ground.rank
    if method == "full":
        return sum(w.numel() for w in matrices) + sum(t.numel() for t in ground.base.rest.values())
    if method == "head":
        return 0
    if method in CHOSEN:
        assert setting is not None
        sizes = {
            n: sum(w.shape[1:])
            for w, names in zip(matrices, ground.names, strict=True)
            for n in names
        }
        return sum(w * sizes[n] for w, n in zip(setting.widths, in_order(ground), strict=True))
    if method == "loraxs":
        return sum(len(w) for w in matrices) * core_rank(ground) ** 2
    if method == "mica":
        return sum(len(w) * mica_rank(ground) * w.shape[2] for w in matrices)
    rank = r // 2 if method == "frozen-half" else r
    found = sum(len(w) * rank * sum(w.shape[1:]) for w in matrices)
    lengths = sum(len(w) * w.shape[1] for w in matrices)
    return found + lengths if method == "dora" else found


def core_rank(ground: Ground) -> int:
    """The widest core that does not cost more than LoRA."""
    matrices = sum(len(w) for w in ground.base.matrices)
    widest = math.isqrt(parameters(ground, "lora") // matrices)
    return min(widest, *(min(w.shape[1:]) for w in ground.base.matrices))


def mica_rank(ground: Ground) -> int:
    """The most left directions that do not cost more than LoRA."""
    return parameters(ground, "lora") // sum(len(w) * w.shape[2] for w in ground.base.matrices)


def online_config(ground: Ground) -> LeloraConfig:
    """The recipe's own, at this rank."""
    return LeloraConfig(rank=ground.rank)


def form_of(
    ground: Ground, method: str, seeds: Sequence[int], settings: Sequence[Setting | None]
) -> Form:
    """The runs of one method."""
    base, runs = ground.base.matrices, len(seeds)
    if method == "full":
        return Whole(base, runs)
    if method == "head":
        return Frozen(base, runs)
    if method == "online":
        config = online_config(ground)
        return Padded(base, runs, max(config.widths), config.fold_rank)
    if method == "loraxs":
        r = core_rank(ground)
        left = [s.left_LMK[..., :r] for s in ground.spectra]
        return Cores(base, left, [s.right_LKN[:, :r] for s in ground.spectra], runs)
    if method == "adalora":
        first = round(GROW * ground.rank)
        steps = ground.steps
        falling = Falling(first, ground.rank, steps, steps // 10, steps // 2, max(steps // 100, 1))
        return Allocated(
            base, [_normal(ground, first, s) for s in seeds], falling, ALPHA * ground.rank
        )
    starts = [start(ground, method, s, of) for s, of in zip(seeds, settings, strict=True)]
    return (Magnitudes if method == "dora" else Products)(base, padded(starts))


def start(ground: Ground, method: str, seed: int, setting: Setting | None) -> Rows:
    """Where a run's products begin."""
    r = ground.rank
    if method in OWN:
        return _chosen(ground, seed, r // 2 if method == "frozen-half" else r, setting)
    if method in ("lora", "rslora", "dora"):
        gate = ALPHA * (r**0.5 if method == "rslora" else 1.0)
        return _rows(ground, _kaiming(ground, r, seed), None, gate)
    if method == "eva":
        return _rows(ground, [x[:, :r] for x in ground.inputs], None, ALPHA)
    if method == "mica":
        r = mica_rank(ground)
        left = [s.left_LMK[..., -r:] for s in ground.spectra]
        zeros = [w.new_zeros(len(w), r, w.shape[2]) for w in ground.base.matrices]
        return _rows(ground, zeros, left, ALPHA, trains_b=False)
    if method == "pissa":
        roots = [(s.values_LK[:, :r] / ALPHA).sqrt() for s in ground.spectra]
        right = [
            s.right_LKN[:, :r] * x[..., None] for s, x in zip(ground.spectra, roots, strict=True)
        ]
        left = [
            s.left_LMK[..., :r] * x[:, None] for s, x in zip(ground.spectra, roots, strict=True)
        ]
        return _rows(ground, right, left, ALPHA, anchored=True)
    assert method == "milora", method
    right = [s.right_LKN[:, -r:].flip(1) for s in ground.spectra]
    return _rows(
        ground, right, [s.left_LMK[..., -r:].flip(2) for s in ground.spectra], 1.0, anchored=True
    )


def _rows(
    ground: Ground, a: list[Tensor], b: list[Tensor] | None, gate: float, *,
    anchored: bool = False, trains_b: bool = True,
) -> Rows:  # fmt: skip
    left = b or [
        x.new_zeros(len(x), w.shape[1], x.shape[1])
        for x, w in zip(a, ground.base.matrices, strict=True)
    ]
    gates = [x.new_full(x.shape[:2], gate) for x in a]
    return Rows(list(a), left, gates, anchored, trains_b)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _kaiming(ground: Ground, rank: int, seed: int) -> list[Tensor]:
    """A as torch begins a linear layer."""
    found = []
    for w, names in zip(ground.base.matrices, ground.names, strict=True):
        bound = w.shape[2] ** -0.5
        each = [
            (2 * torch.rand(rank, w.shape[2], generator=_generator(seed, n)) - 1) * bound
            for n in names
        ]
        found.append(torch.stack(each).to(w.device))
    return found


def _normal(ground: Ground, rank: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of triplets."""
    a, b = [], []
    for w, names in zip(ground.base.matrices, ground.names, strict=True):
        draws = [_generator(seed, name) for name in names]
        a.append(
            torch.stack([torch.randn(rank, w.shape[2], generator=g) for g in draws]).to(w.device)
        )
        b.append(
            torch.stack([torch.randn(w.shape[1], rank, generator=g) for g in draws]).to(w.device)
        )
    return [0.02 * x for x in a], [0.02 * x for x in b]


def _chosen(ground: Ground, seed: int, rank: int, setting: Setting | None) -> Rows:
    """Random components of each matrix: as many, and as strongly, as `setting` says."""
    place = {name: n for n, name in enumerate(in_order(ground))}
    widest = max(setting.widths) if setting is not None else rank
    a, b, gates = [], [], []
    for w, names, right in zip(
        ground.base.matrices, ground.names, _components(ground, seed, widest), strict=True
    ):
        chosen = [(rank, 0, 1.0)] * len(names)
        if setting is not None:
            chosen = [setting.of_matrix(place[name]) for name in names]
        gate = [[scale] * width + [0.0] * (widest - width) for width, _, scale in chosen]
        a.append(right)
        b.append(w.new_zeros(len(w), w.shape[1], widest))
        gates.append(torch.tensor(gate, device=w.device))
    return Rows(a, b, gates)


def _components(ground: Ground, seed: int, rows: int) -> list[Tensor]:
    """Right directions of random components, (L, rows, N) of each group; as the recipe draws them."""
    key = seed, rows
    if key not in ground.drawn:
        found = []
        for names, spectrum in zip(ground.names, ground.spectra, strict=True):
            k = spectrum.values_LK.shape[1]
            wanted = [order("random", rows, k, f"{seed}/{name}") for name in names]
            at = torch.tensor(wanted, device=spectrum.right_LKN.device)
            found.append(torch.take_along_dim(spectrum.right_LKN, at[..., None], 1))
        ground.drawn[key] = found
    return ground.drawn[key]


def padded(starts: Sequence[Rows]) -> list[Rows]:
    """With as many closed rows as the widest run needs."""
    widest = max(s.a_LRN[0].shape[1] for s in starts)

    def wide(x: Tensor, axis: int) -> Tensor:
        shape = list(x.shape)
        shape[axis] = widest - shape[axis]
        return torch.cat([x, x.new_zeros(shape)], axis)

    return [
        Rows([wide(x, 1) for x in s.a_LRN], [wide(x, 2) for x in s.b_LMR],
             [wide(x, 1) for x in s.gate_LR], s.anchored, s.trains_b)
        for s in starts
    ]  # fmt: skip
