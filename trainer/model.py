"""The model of a run: made by the task, sharded, with its weights, and how its data travels."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.fsdp import Chosen, choose_collectives, parallelize
from parallel.tables.divide import in_words
from parallel.weights import check_written, load_safetensors, materialize
from recipes.task import Task
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.failure import end_rank
from trainer.sharing import experts_of, tables_of


def build_model(
    config: Config, task: Task, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, Chosen]:
    """Build it on this rank. Raises `ConfigError` for weights that do not fit."""
    model = task.build_model()
    tables = tables_of(task, config, model, mesh.size())
    parallelize(model, mesh, config.parallel, experts_of(task, config, model), tables)
    parallel = config.parallel
    chosen = choose_collectives(
        model, config.collectives, parallel.node_size, parallel.prefetch, config.launch.timeout,
        end_rank,
    )  # fmt: skip
    materialize(model, device, task.init_weights, config.trainer.seed)
    folder = task.weights_folder()
    try:
        if folder is not None:
            load_safetensors(model, folder, partial(task.locate_weights, model))
        check_written(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model, replace(chosen, notes=[*chosen.notes, *map(in_words, tables)])
