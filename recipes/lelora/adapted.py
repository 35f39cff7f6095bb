"""What a task does to have adapters: in its model, in its first weights, and in what it exports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.lelora.adapter import Adapter
from models.lelora.inject import Target, find_targets, inject, is_linear, refuse_rank
from models.lelora.spectrum import svd_words
from models.stored_weights import Fetch, Stored
from parallel.weights import check_written, load_safetensors, materialize
from recipes.abilities import Steering, Training
from recipes.lelora import baselines
from recipes.lelora.activations import give_directions, input_products
from recipes.lelora.adalora import AdaLora
from recipes.lelora.candidates import Lessons
from recipes.lelora.config import OWN, PEFT, STATIC, LeloraConfig
from recipes.lelora.credit import Meter, Parameters
from recipes.lelora.journal import spectrum_panel
from recipes.lelora.meta import Part, meta_batches, set_apart
from recipes.lelora.population import School
from recipes.lelora.steering import LeloraSteering
from recipes.task import Samples, Task

EVA_BATCHES = 8
"""Micro-batches of each rank whose activations EVA looks at."""


class Adapted:
    """One task's adapters. `heads` are modules that train whole, `task_type` is peft's word for it."""

    def __init__(self, config: LeloraConfig, seed: int, task_type: str) -> None:
        self.config, self.seed, self.task_type = config, seed, task_type
        self.targets: list[Target] = []
        self.heads: list[str] = []
        self.linear: list[str] = []
        self._parts: tuple[Part, Part] | None = None
        self.steering: LeloraSteering | None = None

    @property
    def has_adapters(self) -> bool:
        """There are adapters of ours."""
        return self.config.method in (*OWN, *STATIC)

    @property
    def is_peft(self) -> bool:
        """There are layers of peft's."""
        return self.config.method in PEFT

    def adapt(self, model: nn.Module, heads: Sequence[str] = ()) -> nn.Module:
        """Freeze the base model and put the adapters in. Raises `ValueError`."""
        config, self.heads = self.config, list(heads)
        if config.method == "full":
            return model
        if config.method == "head" and not heads:
            raise ValueError(
                "lelora.method=head trains what is new in the model, and here is nothing: set "
                "lelora.method"
            )
        model.requires_grad_(False)
        if self.has_adapters or self.is_peft:
            self.linear = [name for name, module in model.named_modules() if is_linear(module)]
            self.targets = find_targets(model, config.targets, config.exclude)
            refuse_rank(self.targets, config.rank)
        if self.has_adapters:
            rows = max(config.widths) if config.method in ("lelora", "random") else config.rank
            with torch.device("meta"):
                inject(model, self.targets, config.param, rows, config.fold_rank)
        elif self.is_peft:
            baselines.inject_baseline(model, self.targets, config)
        for name in heads:
            model.get_submodule(name).requires_grad_(True)
        return model

    def init(self, module: nn.Module, otherwise: Callable[[nn.Module], None]) -> None:
        """First weights of a module: an adapter's own, or those of the architecture."""
        if isinstance(module, Adapter):
            module.reset_parameters()
        else:
            otherwise(module)

    def locate(self, model: nn.Module, found: Mapping[str, Stored]) -> dict[str, Stored]:
        """What a folder of the base model has, and first values for what it lacks.

        `found` is about the base model, whose tensors peft calls by other names.
        """
        if self.is_peft:
            renamed = baselines.stored_names(self.targets)
            located = {renamed.get(name, name): stored for name, stored in found.items()}
            added = {
                n: t for n, t in model.state_dict().items() if ".lora_" in n or ".ranknum." in n
            }
            return located | {n: constant(torch.zeros(t.shape)) for n, t in added.items()}
        located = dict(found)
        for target in self.targets:
            adapter = model.get_submodule(target.adapter)
            assert isinstance(adapter, Adapter)
            fold_rows = adapter.get_buffer("fold_a_CN").shape[0]
            first = Adapter(
                adapter.kind, target.shape.outputs, target.shape.inputs, adapter.rows, fold_rows
            )
            first.reset_parameters()
            for name, tensor in first.state_dict().items():
                located[f"{target.adapter}.{name}"] = constant(tensor)
        return located

    def split(self, samples: Samples) -> Samples:
        """What is trained on: all samples but those that judge decisions."""
        if not self._judges:
            return samples
        if self._parts is None:
            self._parts = set_apart(samples, self.config.meta_share, self.seed)
        return self._parts[0]

    @property
    def _judges(self) -> bool:
        return self.config.method == "lelora"

    def _steer_peft(
        self, training: Training, lessons: Lessons, begin: Callable[[], None]
    ) -> Steering | None:
        """First weights of peft's layers, and AdaLoRA's allocator."""
        model, config = training.model, self.config
        baselines.fill(model, self.targets, config, self.seed)
        begin()
        if config.method == "adalora":
            return AdaLora(config, training, self.targets)
        if config.method == "eva":
            batches = [
                {n: t.to(training.device) if isinstance(t, Tensor) else t for n, t in batch.items()}
                for batch in map(lessons.practice, range(EVA_BATCHES))
            ]
            products = input_products(
                model, self.targets, lambda b: lessons.loss(model, b), batches
            )
            give_directions(model, self.targets, products, config.rank)
        return None

    def steer(
        self, task: Task, training: Training, school: Callable[[Part], School] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Steering | None:  # fmt: skip
        """What happens between steps, if anything does; peft's layers get their first weights.

        `school` is what a population would learn on, judged by the meta samples. `begin` is called when
        the model's function is the base model's.
        """
        if self.config.population and school is None:
            raise ValueError(
                f"lelora.population={self.config.population} needs task lelora_classify: set "
                "lelora.population=0"
            )
        size, train = training.micro_batch_size, task.train_samples()

        def practice(number: int) -> Any:
            first = (number * training.ranks + training.rank) * size
            return task.collate([train[(first + n) % len(train)] for n in range(size)])

        lessons = Lessons(task.loss, task.count, practice)
        if self.is_peft:
            return self._steer_peft(training, lessons, begin)
        begin()
        if not self.has_adapters:
            return None
        meter = None
        if self._judges:
            assert self._parts is not None, "train_samples comes first"
            meta = meta_batches(
                self._parts[1], self.config.meta_samples, task.collate, task.count,
                rank=training.rank, ranks=training.ranks, size=size,
            )  # fmt: skip
            parameters = Parameters(training.model, [target.adapter for target in self.targets])
            meter = Meter(
                training.model, task.loss, meta, parameters, training.ranks, training.device
            )
        taught = None
        if self.config.population and school is not None and self._parts is not None:
            taught = school(self._parts[1])
        self.steering = LeloraSteering(self.config, training, self.targets, meter, lessons, taught)
        return self.steering

    def panels(self) -> list[dict[str, Any]]:
        """What was decided so far, and the spectra."""
        if self.steering is None:
            return []
        spectra = [atoms.values_K for atoms in self.steering.adapters.atoms]
        return [*self.steering.journal.panels(), spectrum_panel(self.targets, spectra)]

    def figures(self, step: int, steps: int) -> dict[str, Any]:
        """What the newest decision of the `steps` steps up to `step` was, and what it was worth."""
        return {} if self.steering is None else self.steering.journal.figures(step - steps, step)

    def describe(self) -> dict[str, str]:
        """Method and adapters, for the header."""
        config = self.config
        if self.is_peft:
            what = f"peft's, rank {config.rank}, alpha {baselines.alpha(config):g}"
            return {"method": f"{config.method}: {what}, {len(self.targets)} matrices"}
        if not self.has_adapters:
            what = "everything trains" if config.method == "full" else "only the classifier trains"
            return {"method": f"{config.method}: {what}"}
        words = f"{config.method}: {config.param}, rank {config.rank}, window {config.window}"
        if config.method in ("lelora", "random"):
            words += f", widths {config.widths}"
            words += f"; {', '.join(config.actions)} decided every {config.period} steps"
        if config.method == "lelora":
            words += f" by {config.policy.net}, {config.policy.algo}, {config.credit} credit"
        shapes = [(t.shape.outputs, t.shape.inputs) for t in self.targets]
        found = {"method": words}
        if shapes:
            found["spectra"] = svd_words(shapes)
        if self.steering is not None:
            found["adapters"] = self.steering.words()
        return found

    def flops_share(self, model_parameters: float) -> float:
        """Of a full step's operations: gradients of frozen weights are not worked out."""
        if self.config.method == "full":
            return 1.0
        rows = self.config.rank
        own = sum(rows * (t.shape.outputs + t.shape.inputs) for t in self.targets)
        return (4 * model_parameters + 6 * own) / max(6 * model_parameters, 1)

    def whole_base(
        self, task: Task, base: nn.Module, locate: Callable[[Any], Mapping[str, Any]]
    ) -> nn.Module:
        """The base model with its weights, on the CPU; `base` is the model without adapters, on meta."""
        materialize(base, torch.device("cpu"), task.init_weights, self.seed)
        folder = task.weights_folder()
        if folder is not None:
            load_safetensors(base, folder, locate)
        check_written(base)
        return base


def constant(tensor: Tensor) -> Stored:
    """Values that no folder has, where a name in a folder is asked for."""

    def make(fetch: Fetch) -> Tensor:
        del fetch
        return tensor

    return make
