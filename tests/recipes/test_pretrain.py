import math
import pickle

import pytest
import torch

from models.causal_lm import CausalLMConfig
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.task import DataError
from recipes.text.config import TextConfig

SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}


def task(tmp_path, text="some words to learn\n" * 20, model=None, **data):
    (tmp_path / "a.txt").write_text(text)
    config = TextConfig(
        files=[str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "cache"), holdout=0.0,
        sequence_length=16, **data,
    )  # fmt: skip
    return PretrainTask(
        task=PretrainConfig(), model=CausalLMConfig(**(SMALL | (model or {}))), data=config, seed=0
    )


def test_an_untrained_model_predicts_nothing(tmp_path):
    pretrain = task(tmp_path)
    pretrain.check()
    model = pretrain.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        pretrain.init_weights(module)
    samples = pretrain.train_samples()
    batch = pretrain.collate([samples[0], samples[1]])
    loss = pretrain.loss(model, batch) / pretrain.count(batch)
    assert loss.item() == pytest.approx(math.log(257), abs=0.1)
    figures = pretrain.summarize({"nats": 10.0, "labels": 4.0})
    assert figures["loss"] == 2.5
    assert pretrain.eval_samples() is None
    assert pretrain.flops(batch) > 6 * 257 * 16 * 32


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.vocab_size=100 .* set model.vocab_size=257"):
        task(tmp_path, model={"vocab_size": 100}).check()


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(DataError, match="no text to train on"):
        task(tmp_path, text="").check()


def test_the_task_describes_itself(tmp_path):
    lines = task(tmp_path).describe()
    assert lines["model"].startswith("llama, 1 layers x 16, vocabulary 257")
    assert "1 documents" in lines["data"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"max_positions": 8}, "data.sequence_length=16 is longer than the 8 positions"),
        ({"type": "qwen3", "num_kv_heads": None}, "key/value heads do not divide 2 heads"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_any_rank_starts(model, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        task(tmp_path, model=model).check()


def test_workers_that_start_afresh_get_the_data_and_not_the_model(tmp_path):
    """macOS starts data workers by pickling what they need."""
    pretrain = task(tmp_path, text="x" * 100_000)
    pretrain.check()
    pretrain.build_model()
    pickled = pickle.dumps((pretrain.train_samples(), pretrain.collate))
    assert len(pickled) < 50_000
    samples, collate = pickle.loads(pickled)
    batch = collate([samples[3]])
    assert batch["count"] == 16
    assert (
        batch["tokens_BS"] == pretrain.collate([pretrain.train_samples()[3]])["tokens_BS"]
    ).all()
