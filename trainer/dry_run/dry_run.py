"""`trainer.dry_run=true`: say what a run would take, and start nothing."""

import torch
from rich.console import Console

from recipes.task import Task
from trainer.config import Config
from trainer.devices import Device, chosen_device, device_by_name
from trainer.dry_run.forecast import Forecast, forecast
from trainer.dry_run.lines import forecast_lines
from trainer.dry_run.remedy import remedies, room
from trainer.errors import ConfigError
from trainer.launch import Invocation
from trainer.plan import make_plan
from trainer.watch.header import header_lines, print_header


def dry_run(config: Config, overrides: list[str], task: Task, world_size: int) -> None:
    """Print the plan. `task` has been checked. Raises `ConfigError` for what cannot be."""
    samples, device = task.train_samples(), _device(config)
    plan = make_plan(config, world_size, len(samples), task.axes)
    found = forecast(config, plan, task, samples, device)

    def plan_again(changed: Config) -> float:
        again = make_plan(changed, world_size, len(samples), task.axes)
        return _total(forecast(changed, again, task, samples, device))

    keys: list[str] = []
    if device is not None and _total(found) > room(device):
        keys = remedies(config, plan, _total(found), room(device), plan_again)
    name = device.name if device is not None else "CPU"
    lines = header_lines(
        config,
        Invocation("dry run", overrides),
        plan,
        task.describe(),
        device=name,
        run_dir=None,
    )
    lines |= forecast_lines(config, plan, found, device, keys)
    print_header(Console(), lines)


def _device(config: Config) -> Device | None:
    """The device that is named, or found here; None: CPU ranks."""
    if config.launch.device is not None:
        return None if config.launch.device == "cpu" else chosen_device(config.launch.device)
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    device = device_by_name(name)
    if device is None:
        raise ConfigError(f"{name} is not known here: set launch.device to the nearest that is")
    return device


def _total(found: Forecast) -> float:
    return float(found.memory.total) if found.memory is not None else 0.0
