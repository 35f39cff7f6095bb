import json
import math
import pickle

import pytest
import torch

from models.causal_lm import CausalLMConfig, next_token_loss
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.task import DataError
from recipes.text.config import TextConfig
from recipes.text.corpus import is_held_out

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


def built(pretrain):
    pretrain.check()
    model = pretrain.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        pretrain.init_weights(module)
    return model


def all_of(pretrain, samples, size=4):
    for begin in range(0, len(samples), size):
        yield pretrain.collate([samples[i] for i in range(begin, min(begin + size, len(samples)))])


TEXT = [f"document {n} " * (n % 7 + 1) for n in range(40)]


def mixed(tmp_path, **data):
    """A task on two sources, and their documents."""
    for name, texts in (("a", TEXT[:30]), ("b", TEXT[30:])):
        lines = [json.dumps({f"{name}_text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mixture = {
        name: {
            "files": [str(tmp_path / f"{name}.jsonl")],
            "text_key": f"{name}_text",
            "weight": weight,
        }
        for name, weight in (("a", 1), ("b", 3))
    }
    config = TextConfig(
        mixture=mixture, cache_dir=str(tmp_path / "cache"), holdout=0.3, sequence_length=32, **data
    )
    return PretrainTask(task=PretrainConfig(), model=CausalLMConfig(**SMALL), data=config, seed=0)


def test_a_mixture_is_evaluated_source_by_source(tmp_path):
    """Against the mean over every document by itself."""
    pretrain = mixed(tmp_path, packing="whole")
    model = built(pretrain)
    sums = {}
    for batch in all_of(pretrain, pretrain.eval_samples()):
        for name, value in pretrain.evaluate(model, batch).items():
            sums[name] = sums.get(name, 0.0) + float(torch.as_tensor(value).detach())
    figures = pretrain.summarize(sums)
    nats, labels, num_bytes = {}, {}, {}
    for name, texts in (("a", TEXT[:30]), ("b", TEXT[30:])):
        held_out = [text for text in texts if is_held_out(text.encode(), 0.3)]
        assert held_out
        nats[name] = labels[name] = 0
        # As in the figure, the first token counts like the others.
        num_bytes[name] = sum(map(len, held_out)) / sum(len(text) + 1 for text in held_out)
        for text in held_out:
            ids = torch.tensor([[*text.encode(), 256]])
            for begin in range(0, ids.shape[1], 32):
                piece, after = ids[:, begin : begin + 32], ids[:, begin + 1 : begin + 33]
                logits = model(input_ids=piece, cu_seq_lens_q=torch.tensor([0, piece.shape[1]]),
                               max_length_q=piece.shape[1]).logits  # fmt: skip
                nats[name] += next_token_loss(logits[:, : after.shape[1]], after).item()
                labels[name] += after.numel()
        expected = nats[name] / labels[name] / num_bytes[name]
        assert figures[f"nats_per_byte/{name}"] == pytest.approx(expected, rel=1e-4)
    assert figures["loss"] == pytest.approx(sum(nats.values()) / sum(labels.values()), rel=1e-4)
    of_all = sum(labels[name] * num_bytes[name] for name in "ab")
    assert figures["nats_per_byte"] == pytest.approx(sum(nats.values()) / of_all, rel=1e-4)


def test_a_mixture_says_its_shares(tmp_path):
    pretrain = mixed(tmp_path)
    pretrain.check()
    lines = pretrain.describe()
    train = pretrain.train_samples()
    share = train.counts[1] / len(train)
    assert share == pytest.approx(0.75, abs=0.02)
    assert lines["  b"].startswith(f"{share:.1%} of the sequences (weight 3), ")
    assert "1.00 passes an epoch" in lines["  a"]
    assert [train[i].source for i in (0, len(train) - 1)] == [0, 1]


def test_a_source_that_is_only_evaluated_may_be_held_out_whole(tmp_path):
    pretrain = mixed(tmp_path)
    pretrain.data_config.mixture["b"]["weight"] = 0
    pretrain.check()
    assert {pretrain.train_samples()[i].source for i in range(len(pretrain.train_samples()))} == {0}
    assert "b" in {
        pretrain.data.parts[s.source].short_name
        for s in map(pretrain.eval_samples().__getitem__, range(5))
    }


@pytest.mark.parametrize("model", [{}, {"type": "bloom"}], ids=str)
def test_padding_gives_each_documents_own_loss(tmp_path, model):
    """Also for an architecture that could not keep packed documents apart."""
    if model:
        model = {"num_layers": 1, "hidden_size": 16, "num_heads": None, "head_dim": None,
                 "intermediate_size": None, "config": {"n_head": 2}, **model}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXT[:7]))
    pretrain = task(tmp_path, model=model, packing="none", long_documents="truncate")
    pretrain.data_config.files = [str(tmp_path / "rows.jsonl")]
    pretrain.data_config.sequence_length = 64
    network = built(pretrain)
    samples = pretrain.train_samples()
    together = sum(pretrain.loss(network, batch).item() for batch in all_of(pretrain, samples))
    alone = sum(pretrain.loss(network, batch).item() for batch in all_of(pretrain, samples, 1))
    assert together == pytest.approx(alone, rel=1e-5)
    assert any(batch["padding"] for batch in all_of(pretrain, samples))


def test_packing_whole_documents_gives_the_loss_of_padding(tmp_path):
    losses = []
    for packing in ("whole", "none"):
        pretrain = task(tmp_path, text="", packing=packing, long_documents="truncate")
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXT))
        pretrain.data_config.files = [str(tmp_path / "rows.jsonl")]
        pretrain.data_config.sequence_length = 128
        model = built(pretrain)
        batches = list(all_of(pretrain, pretrain.train_samples()))
        losses.append(sum(pretrain.loss(model, batch).item() for batch in batches))
        assert sum(batch["count"] for batch in batches) == sum(len(text) for text in TEXT)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_longer_documents_are_counted(tmp_path):
    for how, words in (("split", "split"), ("truncate", "truncated"), ("drop", "dropped")):
        pretrain = task(tmp_path, packing="whole", long_documents=how)
        if how == "drop":
            with pytest.raises(DataError, match=r"all 1 documents in .* set data.sequence_length"):
                pretrain.check()
        else:
            assert f"; 1 longer documents {words}" in pretrain.describe()["sequences"]
