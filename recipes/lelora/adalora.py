"""AdaLoRA: peft's layers and peft's allocator, where parameters are sharded.

The allocator wants whole parameters with their gradients. So before each optimizer step a copy of the
adapters is filled with both, gets the gradient of the orthogonality penalty, and gives it back; after
the step it is filled again, allocates, and gives back what was masked. The gradients that the allocator
sees are those of the step, after clipping; the penalty's are added after clipping, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.lelora.inject import Target
from recipes.abilities import Training
from recipes.lelora.config import LeloraConfig
from recipes.lelora.shards import gathered, local, put

NAMES = ("lora_A", "lora_B", "lora_E")
GROW = 1.5
"""Rank at the start, for each of the rank in the end, as the paper has it."""


def adalora_settings(config: LeloraConfig, names: Sequence[str], steps: int) -> Any:
    """peft's configuration: the budget falls over the middle of the run."""
    from peft import AdaLoraConfig

    return AdaLoraConfig(
        init_r=round(GROW * config.rank), target_r=config.rank, total_step=steps,
        tinit=steps // 10, tfinal=steps // 2, deltaT=max(steps // 100, 1),
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        target_modules=list(names),
    )  # fmt: skip


class AdaLora:
    """Looks after the layers between steps; see `recipes.abilities.Steering`."""

    def __init__(self, config: LeloraConfig, training: Training, targets: Sequence[Target]) -> None:
        from peft.tuners.adalora.layer import RankAllocator

        self.training = training
        model = training.model
        self.parameters: dict[str, nn.Parameter] = {
            f"{target.name}.{name}.default": model.get_parameter(f"{target.name}.{name}.default")
            for target in targets
            for name in NAMES
        }
        self.copy = _Copy(self.parameters)
        settings = adalora_settings(config, [t.name for t in targets], training.steps)
        self.penalty = settings.orth_reg_weight
        self.allocator = RankAllocator(self.copy, settings, "default")
        self.done = 0
        training.optimizer.register_step_pre_hook(self._before)
        training.optimizer.register_step_post_hook(self._after)

    def _fill(self) -> None:
        for name, parameter in self.parameters.items():
            copy = self.copy.named[name]
            copy.data = gathered(parameter)
            copy.grad = None if parameter.grad is None else gathered(parameter.grad)

    def _before(self, *_: object) -> None:
        """Add the gradient of |A A^T - 1| and |B^T B - 1|, mean over matrices."""
        self._fill()
        leaves = [n for n in self.parameters if "lora_E" not in n]
        with torch.enable_grad():
            total = sum(
                (_far_from_orthogonal(n, self.copy.named[n]) for n in leaves), torch.zeros(())
            )
            penalty = self.penalty * total / len(leaves)
            found = torch.autograd.grad(penalty, [self.copy.named[n] for n in leaves])
        with torch.no_grad():
            for name, gradient in zip(leaves, found, strict=True):
                parameter, copy = self.parameters[name], self.copy.named[name]
                if parameter.grad is not None and copy.grad is not None:
                    copy.grad = copy.grad + gradient
                    put(parameter.grad, copy.grad)

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """Allocate by what the step has made of the parameters, and their gradients in it."""
        if any(p.grad is None for p in self.parameters.values()):
            return
        self._fill()
        self.done += 1
        self.allocator.update_and_allocate(self.copy, self.done)
        for name, parameter in self.parameters.items():
            if "lora_E" in name:
                put(parameter, self.copy.named[name].data)

    def after_step(self, step: int, norm: Tensor) -> None:
        """Everything happens in the optimizer's hooks."""

    def ranks(self) -> list[int]:
        """Triplets of each matrix that are not masked. Collective."""
        return [
            int((gathered(p) != 0).sum()) for name, p in self.parameters.items() if "lora_E" in name
        ]

    def state(self) -> dict[str, Tensor]:
        """Importance and its uncertainty, whole."""
        found = {"done": torch.tensor(self.done)}
        for name, parameter in self.parameters.items():
            for kind in ("exp_avg_ipt", "exp_avg_unc"):
                kept = getattr(self.allocator, kind).get(name)
                zeros = torch.zeros(parameter.shape, device=local(parameter).device)
                found[f"{kind}/{name}"] = zeros if kept is None else kept.clone()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.done = int(state["done"])
        for name in self.parameters if self.done else ():
            self.allocator.ipt[name] = torch.zeros_like(state[f"exp_avg_ipt/{name}"])
            for kind in ("exp_avg_ipt", "exp_avg_unc"):
                getattr(self.allocator, kind)[name] = state[f"{kind}/{name}"].clone()


def _far_from_orthogonal(name: str, factor: Tensor) -> Tensor:
    product = factor @ factor.T if "lora_A" in name else factor.T @ factor
    eye = torch.eye(len(product), device=product.device, dtype=product.dtype)
    return (product - eye).norm().cpu()


class _Copy(nn.Module):
    """Whole adapters under the names that the allocator looks for."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.named = {
            name: nn.Parameter(torch.zeros(p.shape, device=local(p).device))
            for name, p in parameters.items()
        }

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """As the model would give them."""
        return iter(self.named.items())
