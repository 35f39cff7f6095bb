"""What the routers of a transformers model do in a forward pass, for a load-balance loss.

Legend: T rows, E experts, k experts a row, L layers with experts.

transformers' models do not give it with their outputs unless they compute a loss of their own, which is
over this rank's rows alone. So routers are listened to: modules that give logits (T, E), weights (T, k)
and experts (T, k), as those of Qwen3-MoE, Mixtral and their kin do, with scores by softmax.

Scores are worked out from the logits behind the model, not in its blocks: what a block that is computed
again keeps for the backward pass must not be asked for before the block's turn has come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.precision import at_least_fp32


class Routed(NamedTuple):
    """Sums over rows, which can be added over ranks."""

    visits_LE: Tensor
    """Visits to each expert, int64."""
    chances_LE: Tensor
    """The routers' normalized scores; at least fp32."""


class Listener:
    """Hears the routers of a model while it is asked to."""

    def __init__(self, model: nn.Module, keys: str) -> None:
        """Raises `ValueError`, which names `keys`, if the model has no such routers."""
        self._heard: list[tuple[Tensor, Tensor]] | None = None
        routers = find_routers(model)
        if not routers:
            kind = getattr(model.config, "model_type", type(model).__name__)
            raise ValueError(
                f"{keys}: models of type {kind} have no routers whose load could be balanced: set "
                f"{keys.partition('=')[0]}=0"
            )
        for router in routers:
            router.register_forward_hook(self._hear)

    def _hear(self, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        del router, inputs
        if self._heard is not None:
            logits_TE, _, experts_Tk = output
            self._heard.append((logits_TE, experts_Tk))

    @contextmanager
    def listening(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of each layer, in order, logits (T, E) and experts (T, k), once the pass within is over."""
        heard: list[tuple[Tensor, Tensor]] = []
        self._heard = heard
        try:
            yield heard
        finally:  # so that a block that is computed again is not heard twice
            self._heard = None


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of `model`, as its classes declare them, whose experts are chosen by softmax."""
    kinds: set[type] = set()
    for module in model.modules():
        recorders: Any = getattr(module, "_can_record_outputs", None) or {}
        recorder = recorders.get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type) and getattr(recorder, "index", 0) == 0:
            kinds.add(kind)
    return [
        module
        for module in model.modules()
        if type(module) in kinds and not hasattr(module, "e_score_correction_bias")
    ]


def routed(heard: list[tuple[Tensor, Tensor]], counted_T: Tensor) -> Routed:
    """What the layers did with the rows that `counted_T` says to count."""
    layers = [_layer(logits_TE, experts_Tk, counted_T) for logits_TE, experts_Tk in heard]
    return Routed(*(torch.stack(column) for column in zip(*layers, strict=True)))


def _layer(logits_TE: Tensor, experts_Tk: Tensor, counted_T: Tensor) -> tuple[Tensor, Tensor]:
    chances_TE = at_least_fp32(logits_TE).softmax(1)
    chances_E = (chances_TE * counted_T[:, None]).sum(0)
    counted_R = counted_T.long().repeat_interleave(experts_Tk.shape[1])
    visits_E = counted_R.new_zeros(logits_TE.shape[1])
    return visits_E.scatter_add_(0, experts_Tk.flatten(), counted_R), chances_E
