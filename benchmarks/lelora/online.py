"""The policy that decides during the run: the recipe's own, over runs that are trained side by side.

    P runs, M matrices, L matrices of one shape, S rows of meta samples

Between decisions, nothing is other than with the rest of the methods. At a decision, what a run trains
is measured on its meta samples, for all runs at once; then everything that a run's steering reads and
changes is copied to the host, into tensors of which each run's adapters are views, and the recipe's
`LeloraSteering` learns, decides and switches there, run by run; then it is copied back.

A run does not train on its meta samples. The first classifier is that of all methods, which some of
these samples have helped to fit; that of the recipe has seen none of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from benchmarks.lelora.ground import Ground, in_order
from benchmarks.lelora.policy import targets_of
from benchmarks.lelora.training import Run, Together
from models.lelora.adapter import Adapter
from models.lelora.padded import Padded
from models.lelora.spectrum import Atoms
from recipes.abilities import Training
from recipes.lelora.config import LeloraConfig
from recipes.lelora.credit import SIMPSON, Measured, reliability
from recipes.lelora.meta import set_apart
from recipes.lelora.shards import MOMENTS
from recipes.lelora.spectra import Spectra
from recipes.lelora.steering import LeloraSteering

KEPT = ("step", "reward", "reliability", "credit_gap", "learnt", "went_back", "switched", "rows")
"""Of a line about a decision, in the study's file."""


def meta_rows(config: LeloraConfig, texts: int, seed: int) -> list[int]:
    """Rows of the training part that a run sets apart: as the recipe's would."""
    return [int(row) for row in set_apart(range(texts), config.meta_share, seed)[1].numbers]


class Handed:
    """What was measured for all runs, for one of them."""

    measured: Measured

    def loss(self) -> float:
        """At the end of what was measured."""
        return self.measured.after

    def measure(self, before: Mapping[str, Tensor]) -> Measured:
        """`before` is where this run was at its last decision."""
        del before
        return self.measured


class Online:
    """Has `together`, all of whose runs are `form`'s, decide for itself."""

    def __init__(
        self, together: Together, form: Padded, ground: Ground, config: LeloraConfig,
        runs: Sequence[Run], texts: int, head: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """`head` are weight and bias of a classifier, (P, ...), if there is one."""
        assert together.forms == [form]
        assert config.prune_to == 1.0
        assert config.policy.algo != "grpo"
        self.together, self.form, self.config = together, form, config
        apart = [meta_rows(config, texts, run.seed)[: config.meta_samples] for run in runs]
        device = together.device
        self.halves_PS = [
            torch.tensor([of[half::2] for of in apart], device=device) for half in (0, 1)
        ]
        place = {name: n for n, name in enumerate(in_order(ground))}
        self.places = [torch.tensor([place[n] for n in names]) for names in ground.names]
        ages = form.ages()
        together.optimizer.ages[: len(ages)] = ages
        for at, part in enumerate(head, len(ages)):
            together.optimizer.ages[at] = form.steps_P.view(-1, *[1] * (part.ndim - 1))
        self.device = self._device_tensors(head)
        self.host = {name: [t.detach().cpu() for t in of] for name, of in self.device.items()}
        if device.type == "cpu":
            self.host = {name: [t.clone() for t in of] for name, of in self.host.items()}
        self.folder = TemporaryDirectory()
        spectra = Spectra(atoms_of(ground), 0, 0.0, Path(self.folder.name))
        self.handed = [Handed() for _ in runs]
        self.steerings = [
            self._steering(ground, spectra, n, run.seed, bool(head)) for n, run in enumerate(runs)
        ]
        self._push()
        together.after = self.after_step

    def _device_tensors(self, head: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Everything of a run that steering reads or changes, stacked over runs."""
        groups, moments = self.form.groups, self.together.optimizer.moments
        found = {**self.form.tensors(), "head": list(head), "steps": [self.form.steps_P]}
        for n, key in enumerate(MOMENTS):
            of = [pair[n] for pair in moments]
            found[f"{key}/a_RN"], found[f"{key}/b_MR"] = of[:groups], of[groups : 2 * groups]
            found[f"{key}/head"] = of[2 * groups :]
        return found

    @torch.no_grad()
    def _pull(self) -> None:
        for name, of in self.device.items():
            for host, there in zip(self.host[name], of, strict=True):
                host.copy_(there)

    @torch.no_grad()
    def _push(self) -> None:
        for name, of in self.device.items():
            for host, there in zip(self.host[name], of, strict=True):
                there.copy_(host)
        self.begun = [p.detach().clone() for p in self.together.parameters]

    def _steering(
        self, ground: Ground, spectra: Spectra, run: int, seed: int, head: bool
    ) -> LeloraSteering:
        """The recipe's, over views of one run."""
        model, together = nn.Module(), self.together
        state: dict[Tensor, dict[str, Tensor]] = {}
        for group, names in enumerate(ground.names):
            for at, name in enumerate(names):
                adapter = self._adapter(ground, group, at, run)
                _place(model, f"{name}.adapter", adapter)
                for own, parameter in adapter.named_parameters():
                    state[parameter] = {
                        key: self.host[f"{key}/{own}"][group][run, at] for key in MOMENTS
                    }
                    state[parameter]["step"] = torch.zeros(())
        if head:
            with torch.device("meta"):
                classifier = nn.Linear(1, 1)
            for n, own in enumerate(("weight", "bias")):
                setattr(classifier, own, nn.Parameter(self.host["head"][n][run]))
                kept = {key: self.host[f"{key}/head"][n][run] for key in MOMENTS}
                state[classifier.get_parameter(own)] = {**kept, "step": self.host["steps"][0][run]}
            _place(model, "classifier", classifier)
        betas = together.optimizer.betas
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=betas, weight_decay=0.0)
        optimizer.state.update(state)  # it makes no step: the runs' own does
        folder = Path(self.folder.name) / str(run)
        folder.mkdir()
        shares, plan = together.share_S.tolist(), together.plan
        training = Training(
            model, optimizer, torch.device("cpu"), folder, seed, plan.steps, 1, 0, plan.batch_size,
            plan.max_norm, lambda step: float(shares[step - 1]),
        )  # fmt: skip
        return LeloraSteering(
            self.config, training, targets_of(ground), self.handed[run], spectra=spectra
        )

    def _adapter(self, ground: Ground, group: int, at: int, run: int) -> Adapter:
        """One matrix of a run."""
        outputs, inputs = ground.base.matrices[group].shape[1:]
        with torch.device("meta"):
            adapter = Adapter("dir_ab", outputs, inputs, self.form.rows, self.form.fold_rows)
        for name in self.form.tensors():
            view = self.host[name][group][run, at]
            if name in adapter.trained:
                setattr(adapter, name, nn.Parameter(view))
            else:
                adapter.register_buffer(name, view)
        return adapter

    def after_step(self, step: int) -> None:
        """Decide, if it is time, in all runs."""
        if not self.steerings[0].decides(step):
            return
        for handed, measured in zip(self.handed, self.measure(), strict=True):
            handed.measured = measured
        self._pull()
        for steering in self.steerings:
            steering.after_step(step, torch.zeros(()))
        self._push()
        for notes, steering in zip(self.together.notes, self.steerings, strict=True):
            rows, now = steering.journal.rows, steering.adapters.setting
            notes["decisions"] = [{key: row[key] for key in KEPT if key in row} for row in rows]
            notes["widths"], notes["scales"] = list(now.widths), list(now.scales)
            notes["cost"] = steering.brain.cost(now)

    def measure(self) -> list[Measured]:
        """Of each run since its last decision: see `recipes.lelora.credit`."""
        together, form, groups = self.together, self.form, self.form.groups
        parameters = together.parameters
        P, M = form.runs, sum(map(len, self.places))
        end = [p.detach().clone() for p in parameters]
        way = [e - b for e, b in zip(end, self.begun, strict=True)]
        halves_PM = torch.zeros(2, P, M + 1, dtype=torch.float64)
        squares_PM, losses_P = torch.zeros(P, M, dtype=torch.float64), torch.zeros(2, P).double()
        samples = sum(half_PS.shape[1] for half_PS in self.halves_PS)

        def add(out_PM: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
            """Inner products of each run's matrices; the rest is the last."""
            for n, (x, y) in enumerate(zip(left, right, strict=True)):
                if n < 2 * groups:
                    dots = (x.double() * y.double()).flatten(2).sum(2).cpu()
                    out_PM[:, self.places[n % groups]] += dots
                elif out_PM.shape[1] > M:
                    out_PM[:, M] += (x.double() * y.double()).flatten(1).sum(1).cpu()

        for share, weight in SIMPSON:
            with torch.no_grad():
                for p, b, w, e in zip(parameters, self.begun, way, end, strict=True):
                    p.copy_(e if share == 1.0 else torch.add(b, w, alpha=share))
            for half, rows_PS in enumerate(self.halves_PS):
                part = rows_PS.shape[1] / samples
                loss_P, gradients = together.gradients(rows_PS, part)
                add(halves_PM[half], gradients, [-weight * w for w in way])
                if share == 1.0:
                    add(squares_PM, gradients, gradients)
                if share != 0.5:
                    losses_P[int(share)] += part * loss_P.double().cpu()
        counts_M = torch.zeros(M, dtype=torch.float64)
        for n in range(2 * groups):
            counts_M[self.places[n % groups]] += parameters[n][0, 0].numel()
        return [
            Measured(
                before=float(losses_P[0, run]), after=float(losses_P[1, run]),
                credit_M=halves_PM[:, run, :M].sum(0), rest=float(halves_PM[:, run, M].sum()),
                reliability=reliability(halves_PM[0, run, :M], halves_PM[1, run, :M]),
                gradient_M=(4 * squares_PM[run] / counts_M).sqrt(),  # two half losses
            )
            for run in range(P)
        ]  # fmt: skip


def atoms_of(ground: Ground) -> dict[str, Atoms]:
    """All components of every matrix, on the host."""
    found: dict[str, Atoms] = {}
    for names, spectrum in zip(ground.names, ground.spectra, strict=True):
        left, values, right = (
            of.cpu() for of in (spectrum.left_LMK, spectrum.values_LK, spectrum.right_LKN)
        )
        every = torch.arange(values.shape[1])
        found |= {n: Atoms(values[at], every, left[at], right[at]) for at, n in enumerate(names)}
    return found


def _place(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the submodule of this name, with all that is above it."""
    *above, last = path.split(".")
    for name in above:
        if not hasattr(model, name):
            model.add_module(name, nn.Module())
        model = model.get_submodule(name)
    model.add_module(last, module)
