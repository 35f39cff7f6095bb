"""A new classifier begins as a probe, has its own rate, and is left alone if the folder has one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.linear_probe import fit_probe
from recipes.lelora.head import probe_rows, shared_out
from tests.ranks import run_ranks
from tests.recipes.lelora.toys import Run, write_base, write_texts

PROBE, LR, HEAD_LR = 40, 2e-2, 5e-3


def begun(folder, method, model):
    """The head after the start, the rates by parameter, and the head that it should be."""
    run = Run(folder, lr=LR, method=method, task={"probe": PROBE, "head_lr": HEAD_LR}, run_dir=method,
              rank=2, model=model)  # fmt: skip
    head = {n: t.detach().numpy() for n, t in run.weights().items() if n.startswith("classifier")}
    names = {id(p): n for n, p in run.model.named_parameters()}
    peaks = {names[id(p)]: g["peak"] for g in run.optimizer.param_groups for p in g["params"]}
    samples = [run.train_samples[n] for n in probe_rows(len(run.train_samples), PROBE, 0)]
    batch = run.task.collate(samples)
    seen = []
    run.model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        run.task._logits(run.model, batch)
    probe = fit_probe(seen[0], batch["labels_B"], 3)
    return head, peaks, [part.numpy() for part in probe]


@pytest.mark.parametrize(("ranks", "method"), [(1, "full"), (2, "frozen"), (1, "lora")])
def test_it_begins_as_the_probe_whatever_the_method(tmp_path, ranks, method):
    write_texts(tmp_path)
    write_base(tmp_path)
    model = {"path": f"{tmp_path}/base", "load_weights": True, "config": {}}
    for head, peaks, probe in run_ranks(ranks, begun, str(tmp_path), method, model):
        # the same samples in other batches, and L-BFGS stops where the loss is flat
        np.testing.assert_allclose(head["classifier.weight"], probe[0], atol=2e-2, rtol=2e-2)
        np.testing.assert_allclose(head["classifier.bias"], probe[1], atol=5e-2, rtol=2e-2)
        assert {n: p for n, p in peaks.items() if n.startswith("classifier")} == {
            "classifier.weight": HEAD_LR,
            "classifier.bias": HEAD_LR,
        }
        assert {p for n, p in peaks.items() if not n.startswith("classifier")} == {LR}


def stored(folder):
    model = {"path": f"{folder}/whole", "load_weights": True, "config": {}}
    run = Run(folder, method="head", task={"probe": PROBE}, model=model)
    return run.model.classifier.weight.full_tensor().detach().numpy()


def test_a_stored_classifier_is_kept(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    write_texts(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=259, num_hidden_layers=2, hidden_size=16, intermediate_size=24,
                        num_attention_heads=2, max_position_embeddings=32, num_labels=3)  # fmt: skip
    model = BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "whole")
    [found] = run_ranks(1, stored, str(tmp_path))
    np.testing.assert_array_equal(found, model.classifier.weight.detach().numpy())


@given(st.integers(1, 50), st.integers(1, 7), st.integers(1, 4))
def test_every_row_is_seen_once_on_any_ranks(number, size, ranks):
    rows = list(range(number))
    by_rank = [shared_out(rows, size, rank, ranks) for rank in range(ranks)]
    assert len({len(of) for of in by_rank}) == 1
    assert all(len(one.numbers) == size for of in by_rank for one in of)
    seen = [
        n
        for batch in zip(*by_rank, strict=True)
        for one in batch
        for n in one.numbers[: one.counted]
    ]
    assert seen == rows
