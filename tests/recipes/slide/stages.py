"""Small stages for tests: planted sequences, semantic IDs, exported models, without a launcher."""

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from models.slide.config import SlideConfig
from parallel.weights import materialize
from recipes.slide.beam_export import BeamExportConfig, BeamExportTask
from recipes.slide.config import SequencesConfig
from recipes.slide.gr_train import GrTrainConfig, GrTrainTask
from recipes.slide.list_distill import ListDistillConfig, ListDistillTask
from recipes.slide.list_eval import ListEvalConfig, ListEvalTask
from recipes.slide.sid_build import SidBuildConfig, SidBuildTask

PLANTED = SequencesConfig(source="planted", planted_users=60)
SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_history": 6}


def one_rank():
    """A process group of this process alone; end it with `dist.destroy_process_group`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def done(task, folder, stopping=lambda: False):
    """What a stage without training does, as the trainer would have it."""
    task.check()
    folder.mkdir(parents=True, exist_ok=True)
    return task.work(folder, torch.device("cpu"), stopping)


def build_ids(folder, data=PLANTED, **changes):
    task = SidBuildTask(
        task=SidBuildConfig(**{"codes": 32, **changes}), model=None, data=data, seed=0
    )
    done(task, folder)
    return str(folder)


def teacher(sids, data=PLANTED, model=SMALL, **changes):
    return GrTrainTask(
        task=GrTrainConfig(sids=sids, **changes), model=SlideConfig(**model), data=data, seed=0
    )


def student(sids, data=PLANTED, model=SMALL, **changes):
    model = SlideConfig(**{"list_length": 4, **model})
    return ListDistillTask(
        task=ListDistillConfig(sids=sids, **changes), model=model, data=data, seed=0
    )


def materialized(task, seed=0):
    """Random weights, larger than those that training begins with, so that choices differ."""
    model = task.build_model()
    materialize(model, torch.device("cpu"), task.init_weights, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model.eval()


def exported(task, folder, seed=0, model=None):
    """An exported folder with random weights."""
    model = model or materialized(task, seed)
    Path(folder).mkdir(parents=True)
    state = model.state_dict()
    task.export(
        model, lambda names: {n: state[n].clone() for n in names}, Path(folder), Namespace()
    )
    return str(folder)


def export_of(sids, teachers, data=PLANTED, **changes):
    settings = {"beams": 6, "shards": 5, "batch_size": 16, "validation_users": 20, **changes}
    config = BeamExportConfig(sids=sids, teachers=list(teachers), **settings)
    return BeamExportTask(task=config, model=None, data=data, seed=0)


def evaluation(data=PLANTED, **changes):
    return ListEvalTask(task=ListEvalConfig(**changes), model=None, data=data, seed=0)
