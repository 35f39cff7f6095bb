"""The task on one process, and its loss and gradients over ranks against one process."""

import math
import pickle
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.hybrid.config import HybridConfig
from models.hybrid.documents import Documents
from models.hybrid.model import whole
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize
from recipes.hybrid import HybridTask, HybridTaskConfig
from recipes.text.config import TextConfig
from recipes.text.joined import join
from recipes.text.packing import IGNORED, collate
from tests.models.hybrid.cases import MIXES, packed
from tests.ranks import run_ranks

SMALL = {
    "num_layers": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "block": 4, "top_k": 2, "num_experts": 6, "active_experts": 2,
    "expert_size": 8, "init_std": 0.2,
}  # fmt: skip
TEXTS = [f"document {n} " * (n % 5 + 1) for n in range(30)]


def task(folder=None, balance=0.5, model=None, **data):
    if folder is not None:
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        data |= {"files": [str(folder / "*.txt")], "cache_dir": str(folder / "cache")}
    return HybridTask(
        task=HybridTaskConfig(balance=balance),
        model=HybridConfig(**(SMALL | (model or {}))),
        data=TextConfig(**({"sequence_length": 64, "holdout": 0.2} | data)),
        seed=0,
    )


def built(hybrid):
    model = hybrid.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        hybrid.init_weights(module)
    return model


@pytest.mark.parametrize("packing", ["stream", "whole", "none"])
def test_joined_sequences_are_the_padded_ones_without_padding(packing, tmp_path):
    samples = task(tmp_path, packing=packing, long_documents="truncate").train_samples()
    chosen = [samples[n] for n in range(5)]
    joined, padded = join(chosen), collate(chosen, end=256)
    bounds = padded["cu_seq_lens"].tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)]
    there = torch.ones(padded["tokens_BS"].numel(), dtype=torch.bool)
    if packing != "stream":  # the last piece of a sequence that is not full
        size = padded["tokens_BS"].shape[1]
        assert padded["padding"]
        for row, sample in enumerate(chosen):
            used = len(sample.tokens_S) - sample.padding
            there[row * size + used : (row + 1) * size] = False
    kept = [n for n, begin in zip(lengths, bounds[:-1], strict=True) if there[begin]]
    assert joined["lengths"] == tuple(kept)
    assert torch.equal(joined["tokens_T"], padded["tokens_BS"].flatten()[there])
    assert torch.equal(joined["labels_T"], padded["labels_BS"].flatten()[there])
    documents = Documents(joined["lengths"], joined["cu_seq_lens"])
    assert torch.equal(documents.positions(), padded["positions_BS"].flatten()[there])
    assert joined["count"] == padded["count"] == (joined["labels_T"] != IGNORED).sum()


def test_an_untrained_model_predicts_nothing_and_spreads_its_rows(tmp_path):
    hybrid = task(tmp_path, model={"init_std": 0.02})
    hybrid.check()
    model, samples = built(hybrid), hybrid.train_samples()
    batch = hybrid.collate([samples[0], samples[1]])
    loss = hybrid.loss(model, batch) / hybrid.count(batch)
    nats = task(balance=0.0).loss(model, batch) / hybrid.count(batch)
    assert nats.item() == pytest.approx(math.log(257), abs=0.1)
    assert (loss - nats).item() == pytest.approx(0.5, abs=0.2)  # a balance of 1, weighted
    assert hybrid.flops(batch) > 6 * 257 * 16 * 128


@torch.no_grad()
def test_an_evaluation_adds_up_over_batches_and_sources(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "ab"[number % 3 == 0] / f"{number}.txt").write_text(text)
    parts = {name: {"files": [str(tmp_path / name / "*.txt")]} for name in "ab"}
    hybrid = task(mixture=parts, cache_dir=str(tmp_path / "cache"), packing="whole", holdout=0.5)
    model, samples = built(hybrid), hybrid.eval_samples()
    whole_sums = hybrid.evaluate(model, hybrid.collate([samples[n] for n in range(len(samples))]))
    each = [hybrid.evaluate(model, hybrid.collate([samples[n]])) for n in range(len(samples))]
    for name, value in whole_sums.items():
        added = sum(torch.as_tensor(sums[name]) for sums in each)
        torch.testing.assert_close(added, torch.as_tensor(value), check_dtype=False)
    assert whole_sums["nats/0"] + whole_sums["nats/1"] == pytest.approx(whole_sums["nats"].item())
    made = {name: torch.as_tensor(value).double() for name, value in whole_sums.items()}
    figures = hybrid.summarize({name: v if v.dim() else v.item() for name, v in made.items()})
    assert figures["loss"] == pytest.approx(math.log(257), abs=1.5)
    assert 1 <= figures["expert_load"] <= 3


def test_workers_that_start_afresh_can_make_batches(tmp_path):
    hybrid = task(tmp_path)
    hybrid.check()
    hybrid.build_model()
    samples, make = pickle.loads(pickle.dumps((hybrid.train_samples(), hybrid.collate)))
    assert make([samples[0]])["count"] == hybrid.collate([hybrid.train_samples()[0]])["count"]


def test_the_task_describes_itself(tmp_path):
    lines = task(tmp_path).describe()
    assert lines["model"] == "hybrid, 4 layers x 16, vocabulary 257"
    assert lines["attention"] == "3 block_topk, 1 full; 2 of blocks of 4 tokens"
    assert lines["experts"] == "2 of 6 and a shared one, in 3 layers"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"vocab_size": 100}, "set model.vocab_size=257 or more"),
        ({"max_positions": 32}, "set model.max_positions=64 or more"),
        ({"path": "/nowhere"}, "set model.path to a local folder"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(model, words):
    with pytest.raises(ValueError, match="set model") as error:
        task(model=model).check()
    assert words in str(error.value)
    with pytest.raises(ValueError, match="task.balance=-1 is too small"):
        task(balance=-1)


def batch_of(lengths, seed):
    """Random documents, each with a label for all rows but its last."""
    tokens, documents = packed(lengths, 257, seed)
    ends = documents.cu_seq_lens[1:].long()[torch.tensor(lengths, dtype=torch.long) > 0] - 1
    labels = tokens.roll(-1).index_fill(0, ends, IGNORED)
    return {
        "tokens_T": tokens, "labels_T": labels, "lengths": tuple(lengths),
        "cu_seq_lens": documents.cu_seq_lens, "count": int((labels != IGNORED).sum()),
    }  # fmt: skip


def part_of(batch, first, last):
    """Documents `first` to `last` of a batch."""
    lengths = batch["lengths"][first:last]
    begin, end = (int(batch["cu_seq_lens"][n]) for n in (first, last))
    part = {name: batch[name][begin:end] for name in ("tokens_T", "labels_T")}
    count = int((part["labels_T"] != IGNORED).sum())
    cu_seq_lens = Documents.of(lengths).cu_seq_lens
    return {**part, "lengths": lengths, "cu_seq_lens": cu_seq_lens, "count": count}


def train(splits, checkpointing, steps=4):
    """Losses, and weights after a few steps of descent; each mix is split over ranks at `splits`."""
    hybrid = task()
    config = ParallelConfig(activation_checkpointing=checkpointing)
    config.reduce_dtype = "float64"  # not for users: so that all is exact
    world, rank = dist.get_world_size(), dist.get_rank()
    model = hybrid.build_model().double()
    parallelize(model, build_mesh(mesh_shape(config, world), "cpu"), config)
    materialize(model, torch.device("cpu"), hybrid.init_weights, seed=1)
    losses = []
    for step in range(steps):
        mix = MIXES[step % len(MIXES)]
        batch = batch_of(mix, step)
        cuts = [0, *(min(cut, len(mix)) for cut in splits), len(mix)]
        set_last_micro_batch(model, last=True, every=False)
        loss = hybrid.loss(model, part_of(batch, cuts[rank], cuts[rank + 1]))
        (loss * world / batch["count"]).backward()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / batch["count"])
        assert all(p.grad is not None for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.5 * p.grad)
                p.grad = None
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p
               for n, p in model.named_parameters()}  # fmt: skip
    return losses, {n: w.detach().numpy() for n, w in weights.items()}


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, train, (), "none")[0]


@pytest.mark.parametrize(
    ("splits", "checkpointing"), [((1,), "none"), ((9,), "block"), ((0, 2), "selective")]
)
def test_ranks_train_as_one_process_does_wherever_documents_are(splits, checkpointing, alone):
    """With a rank that never has anything, too; the balance loss has a large part in it."""
    expected, weights = alone
    for losses, state in run_ranks(len(splits) + 1, train, splits, checkpointing):
        assert losses == pytest.approx(expected, abs=1e-10)
        for name, value in state.items():
            assert abs(value - weights[name]).max() < 1e-9, name
    assert not math.isclose(expected[0], expected[-1])


def test_rows_are_whole_documents():
    hybrid = task()
    batch = batch_of((5, 3), 0)
    rows = hybrid.rows(batch)
    expected = whole(Documents.of((5, 3)))
    assert torch.equal(rows.positions_T, expected.positions_T)
