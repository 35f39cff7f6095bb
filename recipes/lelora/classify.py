"""Classification of texts by an encoder through adapters: task `lelora_classify`.

B texts, S tokens, L labels
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from configs.values import at_least
from models.causal_lm import init_weights, local_folder
from models.encoder import EncoderConfig, build_encoder, encoder_config, head_names
from models.hf_folder import Read, write_hf_folder
from models.stored_weights import Stored, locate, storage_rules
from recipes.abilities import Steering, Training
from recipes.lelora.adapted import Adapted, constant
from recipes.lelora.config import LeloraConfig
from recipes.lelora.confusion import confusion, shares
from recipes.lelora.exporting import export_adapter, export_arguments, merged, writes_adapter
from recipes.lelora.head import begin_on, first_values, probe_rows
from recipes.lelora.labelled import Labelled, LabelledConfig, read_labelled
from recipes.lelora.meta import Part
from recipes.lelora.population import School
from recipes.lelora.schooling import copies, in_turn
from recipes.lelora.texts import FIRST_ID, Texts, encoded, padded, tokenizer_of
from recipes.task import Batch, Samples


@dataclass(kw_only=True)
class LeloraClassifyConfig:
    """The `task` node."""

    name: str = "lelora_classify"
    head_lr: float | None = 1e-3
    """Peak learning rate of the classifier, whatever that of the adapters is; null: optim.lr."""
    probe: int = 4096
    """A new classifier begins as the best linear one for at most so many training samples, as the base
    model sees them (if it classifies texts, not tokens); 0: it begins with random weights."""

    def __post_init__(self) -> None:
        at_least("task.probe", self.probe, 0)
        if self.head_lr is not None:
            at_least("task.head_lr", self.head_lr, 0)


class LeloraClassifyTask:
    """See `recipes.task.Task` for what each method promises."""

    configs: ClassVar[Mapping[str, type]] = {
        "task": LeloraClassifyConfig,
        "model": EncoderConfig,
        "data": LabelledConfig,
        "lelora": LeloraConfig,
    }
    axes: ClassVar[frozenset[str]] = frozenset({"replicate", "shard"})

    def __init__(
        self, *, task: LeloraClassifyConfig, model: EncoderConfig, data: LabelledConfig, seed: int,
        lelora: LeloraConfig,
    ) -> None:  # fmt: skip
        self.config = task
        self.model_config, self.data_config, self.seed = model, data, seed
        self.adapted = Adapted(lelora, seed, "SEQ_CLS")
        self._model: nn.Module | None = None
        self._matmul_parameters = 0.0
        self._head_is_stored = False

    @cached_property
    def tokenizer(self) -> Any:
        """Of transformers; None: bytes."""
        return tokenizer_of(self.data_config.tokenizer)

    @cached_property
    def parts(self) -> tuple[Labelled, Labelled]:
        """Training texts and held-out ones, read when first needed."""
        return read_labelled(self.data_config)

    @cached_property
    def hf_config(self) -> Any:
        """The transformers configuration of the model."""
        size = FIRST_ID + 256 if self.tokenizer is None else len(self.tokenizer)
        return encoder_config(self.model_config, size, self.parts[0].names)

    @cached_property
    def _train(self) -> Texts:
        return encoded(self.parts[0], self.tokenizer, self.data_config.max_length)

    @cached_property
    def _held_out(self) -> Texts:
        return encoded(self.parts[1], self.tokenizer, self.data_config.max_length)

    def check(self) -> None:
        """Read the texts, find the model, and look for the layers to adapt."""
        self.build_model()
        self.weights_folder()
        positions = getattr(self.hf_config, "max_position_embeddings", None)
        if positions and self.data_config.max_length > positions:
            raise ValueError(
                f"data.max_length={self.data_config.max_length} is longer than the {positions} "
                f"positions of the model: set data.max_length={positions} or less"
            )

    def _base_model(self) -> nn.Module:
        model = build_encoder(self.hf_config, self.model_config.pooling)
        self._model, self._storage_rules = model, storage_rules(model)
        matrices = [
            p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n
        ]
        self._matmul_parameters = float(sum(matrices))
        return model

    def build_model(self) -> nn.Module:
        """The encoder and its classifier on the meta device, with adapters."""
        model = self._base_model()
        return self.adapted.adapt(model, head_names(model))

    def init_weights(self, module: nn.Module) -> None:
        """The architecture's, and the adapters'."""
        assert self._model is not None, "build_model comes first"
        model = self._model
        self.adapted.init(module, lambda inner: init_weights(model, inner))

    def weights_folder(self) -> Path | None:
        """`model.path`, if its weights are wanted."""
        config = self.model_config
        return local_folder(config.path) if config.path and config.load_weights else None

    def locate_weights(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        """By transformers' own rules. A classifier that the folder lacks begins as it would anyway."""
        base = (
            build_encoder(self.hf_config, self.model_config.pooling)
            if self.adapted.is_peft
            else model
        )
        return self.adapted.locate(model, self._locate_base(base, stored))

    def _locate_base(self, model: nn.Module, stored: Iterable[str]) -> dict[str, Stored]:
        found = locate(model, self._storage_rules, stored)
        names = [f"{head}.{n}" for head in head_names(model) for n, _ in _parameters(model, head)]
        self._head_is_stored = all(name in found for name in names)
        for head in head_names(model):
            for name, parameter in _parameters(model, head):
                if f"{head}.{name}" not in found:
                    found[f"{head}.{name}"] = constant(
                        first_values(f"{head}.{name}", parameter, self.seed)
                    )
        return found

    def train_samples(self) -> Samples:
        """Training texts, without those that judge decisions."""
        return self.adapted.split(self._train)

    def eval_samples(self) -> Samples | None:
        """Held-out texts, or those of `data.test_files`."""
        return self._held_out if len(self._held_out) else None

    def collate(self, samples: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
        """Padded on the right to the longest."""
        padding = 0 if self.tokenizer is None else (self.tokenizer.pad_token_id or 0)
        return padded(samples, padding)

    def count(self, batch: Batch) -> int:
        """Texts."""
        return int(batch["count"])

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(
            input_ids=batch["tokens_BS"], attention_mask=batch["mask_BS"]
        ).logits.float()
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy summed over the texts, in nats."""
        logits_BL = self._logits(model, batch)
        return nn.functional.cross_entropy(logits_BL, batch["labels_B"], reduction="sum")

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Summed loss, and how often each label was given for each."""
        logits_BL, labels_B = self._logits(model, batch), batch["labels_B"]
        return {
            "nats": nn.functional.cross_entropy(logits_BL, labels_B, reduction="sum"),
            "confusion_LL": confusion(logits_BL, labels_B),
        }

    def summarize(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Loss of a text, accuracy, and the mean of the labels' F1."""
        confusion_LL = sums["confusion_LL"]
        return {"loss": sums["nats"] / max(float(confusion_LL.sum()), 1.0), **shares(confusion_LL)}

    def steering(self, training: Training) -> Steering | None:
        """See `recipes.abilities.Steers`."""
        return self.adapted.steer(
            self,
            training,
            lambda meta: self._school(training, meta),
            lambda: self._begin_head(training),
        )

    def own_rates(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """See `recipes.abilities.HasRates`: the classifier's."""
        if self.config.head_lr is None:
            return {}
        every = [p for head in head_names(model) for _, p in _parameters(model, head)]
        return dict.fromkeys(every, self.config.head_lr)

    def _begin_head(self, training: Training) -> None:
        """A new classifier begins as a linear probe; that of a checkpoint has it behind it."""
        if training.resumed or not self.config.probe or self._head_is_stored:
            return
        samples = self.train_samples()
        begin_on(
            training, head_names(training.model), probe_rows(len(samples), self.config.probe, self.seed),
            lambda rows: self.collate([samples[n] for n in rows]), self._logits,
        )  # fmt: skip

    def _school(self, training: Training, meta: Part) -> School:
        """What a population learns on: batches of the run's size, in the samples' order.

        Rounds are judged by the first meta samples, at most half of them; the contest by as many others.
        """
        number = min(len(meta) // 2, self.adapted.config.meta_samples)
        base = self._base_model()
        whole = self.adapted.whole_base(self, base, lambda stored: self._locate_base(base, stored))
        heads = {f"{h}.{n}": p for h in head_names(base) for n, p in _parameters(training.model, h)}

        def each(model: nn.Module, batch: Batch) -> Tensor:
            logits_BL = self._logits(model, batch)
            return nn.functional.cross_entropy(logits_BL, batch["labels_B"], reduction="none")

        return School(
            base=copies(
                whole, heads, lambda: build_encoder(self.hf_config, self.model_config.pooling),
                training.device,
            ),
            heads=head_names(base), each=each,
            batch=in_turn(
                self.train_samples(), training.micro_batch_size * training.ranks, self.collate
            ),
            meta=[self.collate([meta[n] for n in range(number)])],
            check=[self.collate([meta[number + n] for n in range(number)])], device=training.device,
            head_lr=self.config.head_lr,
        )  # fmt: skip

    def panels(self) -> list[dict[str, Any]]:
        """What was decided."""
        return self.adapted.panels()

    def figures(self, step: int, steps: int, seconds: Sequence[float]) -> dict[str, Any]:
        """See `recipes.abilities.HasFigures`."""
        del seconds
        return self.adapted.figures(step, steps)

    def flops(self, batch: Batch) -> float:
        """Matrix products of the layers, without gradients of what is frozen."""
        share = self.adapted.flops_share(self._matmul_parameters)
        return share * 6 * self._matmul_parameters * float(batch["tokens"])

    def describe(self) -> dict[str, str]:
        """Model, texts, and the method."""
        config, (train, held_out) = self.hf_config, self.parts
        files = self.data_config.files
        what = " ".join(files) if files else "docstrings of Python's standard library, by package"
        return {
            "model": f"{config.model_type}, {config.num_hidden_layers} layers x {config.hidden_size}",
            "data": f"{what}: {len(train.texts):,} texts, {len(held_out.texts):,} held out, "
            f"{len(train.names)} labels",
            **self.adapted.describe(),
        }

    def show(self, sample: tuple[list[int], int]) -> Iterator[str]:
        """The label, then the text as the model sees it."""
        tokens, label = sample
        yield f"label {self.parts[0].names[label]}, {len(tokens)} tokens"
        if self.tokenizer is not None:
            yield str(self.tokenizer.decode(tokens))
        else:
            yield bytes(t - FIRST_ID for t in tokens if t >= FIRST_ID).decode(errors="replace")

    def survey(self) -> dict[str, str]:
        """What the header says, and how often each label comes."""
        train = self.parts[0]
        counts = [train.labels.count(number) for number in range(len(train.names))]
        lines = [f"{name}: {count:,}" for name, count in zip(train.names, counts, strict=True)]
        return {**self.describe(), "labels": "\n".join(lines)}

    @classmethod
    def add_export_arguments(cls, parser: ArgumentParser) -> None:
        """Adapter or merged weights."""
        export_arguments(parser)

    def export(self, model: nn.Module, read: Read, out: Path, options: Namespace) -> str:
        """A LoRA folder of peft with the classifier, or (`--merge`) a folder of whole weights.

        Raises `ValueError`.
        """
        if self.model_config.pooling != "first":
            raise ValueError(
                f"model.pooling={self.model_config.pooling}: readers of transformers' folders give the "
                "classifier the first token, so this is not exported: train with model.pooling=first"
            )
        if writes_adapter(self.adapted, options):
            base = self.model_config.path if self.model_config.load_weights else None
            return export_adapter(self.adapted, model, read, out, options, base)
        if self.adapted.config.method != "full":
            base_model = self._base_model()
            read = merged(
                self.adapted,
                self,
                base_model,
                read,
                lambda stored: self._locate_base(base_model, stored),
            )
            model = self._base_model()
        size = write_hf_folder(model, read, out, options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(out)
        return f"{size / 2**30:.2f} GiB in {options.dtype}"

    def __getstate__(self) -> dict[str, Any]:
        """What data workers need: the tokenizer, and no model."""
        dropped = {"_model", "adapted", "_storage_rules", "parts", "_train", "_held_out"}
        return {name: value for name, value in self.__dict__.items() if name not in dropped}


def _parameters(model: nn.Module, head: str) -> list[tuple[str, nn.Parameter]]:
    return list(model.get_submodule(head).named_parameters())
