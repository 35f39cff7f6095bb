"""TRIP's item table divided by rows: what one process finds, and what FSDP2 finds."""

import re
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from models.trip import reconstruction
from models.trip.reconstruction import choose_masked
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.norm import clip, global_norm
from parallel.tables import exchange
from parallel.weights import materialize
from recipes.trip import INPUTS
from tests.ranks import run_ranks
from tests.recipes.ctr.test_trip import make, ratings
from tests.runs.helpers import metrics, train, weights
from trainer.cli import run

needs_torchrec = pytest.mark.skipif(find_spec("torchrec") is None, reason="no torchrec")

RUN = (
    "+recipe=trip", "data=planted", "data.planted_users=100", "model.hidden_size=8",
    "model.max_history=12", "model.dropout=0", "model.reconstruction=1e-9", "trainer.batch_size=16",
    "trainer.workers=0", "logging.wandb.mode=disabled", "logging.every=1", "optim.warmup=0",
    "optim.schedule=constant", "checkpoint.every=0", "trainer.resume=auto", "trainer.eval_samples=70",
)  # fmt: skip


def check_trip(folder):
    """Two steps: one whose hidden items are told from drawn candidates, one from the whole catalogue."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reconstruction.PART = 7
    task = make(folder, dropout=0.0)
    samples, config = task.train_samples(), ParallelConfig(tables="rows")
    models = model, alone = task.build_model(), task.build_model()
    mesh = build_mesh(mesh_shape(config, world), "cpu")
    parallelize(model, mesh, config, tables=task.tables(model))
    optimizers = []
    for each in models:
        materialize(each, torch.device("cpu"), task.init_weights, seed=3)
        optimizers.append(torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True))
    shares = [range(8 * r, 8 * r + 3 + 2 * r) for r in range(world)]
    count = sum(map(len, shares))
    for step in range(2):
        torch.manual_seed(step)
        drawn = reconstruction.Urn.of(torch.arange(2, task.parts.num_items)).draw(9)
        loss = _loss(task, model, samples, shares[rank], drawn if step == 0 else None)
        (loss * world / count).backward()
        losses = [
            _loss(task, alone, samples, share, drawn if step == 0 else None) for share in shares
        ]
        (sum(losses) / count).backward()
        torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=1e-6)
        grads, right = [[p.grad for p in each.parameters()] for each in models]
        for (name, _), ours, theirs in zip(alone.named_parameters(), grads, right, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6, msg=name)
        norm, _ = global_norm(grads, torch.zeros(1))
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(right), rtol=1e-5, atol=0)
        for each in (grads, right):
            clip(each, norm, 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        # Adam's first steps are as long where a gradient is rounding only
        far = (ours.full_tensor() - theirs).abs()
        assert (far < 1e-4).float().mean() > 0.98, name
        assert far.max() < 0.05, name

    half = task.build_model()
    parallelize(
        half, mesh, ParallelConfig(tables="rows", param_dtype="bfloat16"), tables=task.tables(half)
    )
    materialize(half, torch.device("cpu"), task.init_weights, seed=3)
    ids = torch.tensor([[5, 6, 5], [2, 3, 6]])
    rows = half.items(ids)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows, half.items.rows_VD.full_tensor()[ids].bfloat16())
    rows.sum().backward()
    grad = half.items.rows_VD.grad.full_tensor()
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad[:, 0], ids.flatten().bincount(minlength=len(grad)).float())


def _loss(task, model, samples, share, candidates):
    batch = task.collate([samples[n] for n in share])
    priority_BN = torch.linspace(0, 0.9, batch["items_BN"].shape[1]).expand_as(batch["items_BN"])
    masked_BM = choose_masked(batch["groups_BN"], batch["items_BN"] > 1, 0.3, priority_BN)
    out = model(*(batch[name] for name in INPUTS), masked_BM, candidates)
    return out.logits_B.sin().sum() + out.nats_R.sum()


@needs_torchrec
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_divide_the_table_find_what_one_process_finds(tmp_path, world):
    run_ranks(world, check_trip, ratings(tmp_path))


@needs_torchrec
@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_with_fsdp(tmp_path, monkeypatch):
    for folder, steps, ranks, way in (
        ("straight", 6, 2, "fsdp"), ("r", 2, 2, "rows"), ("r", 4, 4, "rows"), ("r", 6, 2, "fsdp"),
    ):  # fmt: skip
        code, output = train(*RUN, f"trainer.steps={steps}", "trainer.eval_every=2",
                             f"run.dir={folder}", f"parallel.tables={way}", cwd=tmp_path,
                             ranks=ranks)  # fmt: skip
        assert code == 0, output
        assert bool(re.search(r"table of \d+ x 8 by rows", output)) == (way == "rows")
    monkeypatch.chdir(tmp_path)
    straight, resumed = (
        [row["loss"] for row in metrics(run) if "loss" in row] for run in ("straight", "r")
    )
    assert resumed == pytest.approx(straight, abs=1e-4)
    straight, resumed = (
        {row["step"]: row["logloss_test"] for row in metrics(run, "eval")}
        for run in ("straight", "r")
    )
    assert list(straight) == [2, 4, 6]
    assert resumed == pytest.approx(straight, abs=1e-3)
    alone, parted = (weights(run, 6)[0] for run in ("straight", "r"))
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, parted[name], rtol=0, atol=2e-3, msg=name)


def test_settings_that_cannot_be_are_one_error(capsys, monkeypatch):
    words = "launch.nproc=4 parallel.tables=rows trainer.dry_run=true data.files=[text.txt]"
    assert run(f"+recipe=tiny {words}".split()) == 2
    error = capsys.readouterr().err
    assert "parallel.tables=rows: task pretrain has no embedding tables" in error
    assert run(["+recipe=trip", "parallel.tables=some", "trainer.dry_run=true"]) == 2
    assert "parallel.tables=some is not one of auto, fsdp, rows" in capsys.readouterr().err
    exchange.problem.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = "+recipe=trip data=planted launch.nproc=4 launch.device=cpu parallel.tables=rows trainer.dry_run=true"
    assert run(words.split()) == 2
    error = capsys.readouterr().err
    assert "torchrec is not installed: pip install" in error
    assert "or set parallel.tables=fsdp" in error
    exchange.problem.cache_clear()


@needs_torchrec
def test_a_plan_knows_that_no_rank_holds_the_table(capsys, monkeypatch):
    """Of 4 ranks, each has a quarter of the rows and of their moments and gradients."""
    monkeypatch.setattr("parallel.tables.choice.LARGE", 2**10)
    words = "+recipe=trip data=planted data.planted_users=100 launch.nproc=4 launch.device=cpu trainer.dry_run=true"
    shown = []
    for way in ("fsdp", "auto"):
        assert run([*words.split(), f"parallel.tables={way}"]) == 0
        shown.append(capsys.readouterr().out)
    assert "by rows" not in shown[0]
    assert re.search(r"parameters .*; tables of .* by rows", shown[1])
    assert "rows of tables up to" in shown[1]
    parameters = [re.search(r"parameters +(\S+)", text)[1] for text in shown]
    assert parameters[0] == parameters[1]
