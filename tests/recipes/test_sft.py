import json
import pickle

import pytest
import torch

from models.causal_lm import CausalLMConfig
from recipes.sft import ChatConfig, SFTConfig, SFTTask
from recipes.task import DataError
from recipes.text.packing import IGNORED

SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
ROWS = [{"prompt": f"say {n}", "completion": str(n) * 3} for n in range(20)]


def task(tmp_path, rows=ROWS, **data):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "files": [str(tmp_path / "a.jsonl")], "cache_dir": str(tmp_path / "cache"), "holdout": 0.0,
        "sequence_length": 64,
    }  # fmt: skip
    config = ChatConfig(**(values | data))
    return SFTTask(task=SFTConfig(), model=CausalLMConfig(**SMALL), data=config, seed=0)


def built(sft):
    sft.check()
    model = sft.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        sft.init_weights(module)
    return model


@pytest.mark.parametrize("packing", ["whole", "none", "stream"])
def test_only_answers_are_labels(tmp_path, packing):
    sft = task(tmp_path, packing=packing)
    sft.check()
    samples = sft.train_samples()
    learnt = []
    for index in range(len(samples)):
        labels = samples[index].labels_S
        learnt += labels[labels != IGNORED].tolist()
    answers = sft.tokenizer.decode(learnt).split("<end>")
    assert sorted(answers) == ["", *sorted(row["completion"] for row in ROWS)]
    assert sft.data.num_labels.sum() == len(learnt)


def test_a_prompt_that_fills_the_sequence_has_no_label_and_loss_0(tmp_path):
    """Truncation masks every label: counted, no NaN, and an error only where nothing is left."""
    long = {"prompt": "x" * 100, "completion": "never seen"}
    sft = task(tmp_path, rows=[*ROWS, long], packing="none")
    model = built(sft)
    assert (
        "1 longer documents truncated; 1 sequences without a label" in sft.describe()["sequences"]
    )
    samples = sft.train_samples()
    [unlabelled] = [i for i, n in enumerate(sft.data.num_labels) if n == 0]
    batch = sft.collate([samples[unlabelled]])
    assert sft.count(batch) == 0
    loss = sft.loss(model, batch)
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
    assert sft.summarize({"nats": 0.0, "labels": 0.0})["loss"] == 0
    with pytest.raises(DataError, match="none of the 1 training sequences has a label"):
        task(tmp_path, rows=[long]).check()


def test_the_loss_is_that_of_the_answers_alone(tmp_path):
    sft = task(tmp_path, rows=ROWS[:1], packing="none")
    model = built(sft)
    batch = sft.collate([sft.train_samples()[0]])
    prompt, answer = b"user\nsay 0", b"000"
    ids = torch.tensor([[*prompt, 256, *b"assistant\n", *answer, 256]])
    logits = model(
        input_ids=ids, cu_seq_lens_q=torch.tensor([0, ids.shape[1]]), max_length_q=ids.shape[1]
    ).logits[0]
    expected = -sum(
        logits[at - 1].log_softmax(-1)[ids[0, at]] for at in range(ids.shape[1] - 4, ids.shape[1])
    )
    torch.testing.assert_close(sft.loss(model, batch), expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "narrator", "content": "x"}]},
            r"a\.jsonl:21: unknown role 'narrator'",
        ),
        ({"text": "x"}, r"a\.jsonl:21: none of messages, .*but 'text'"),
        ({"prompt": "\ud800", "completion": "x"}, r"a\.jsonl:21: not UTF-8 \(surrogates"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        task(tmp_path, rows=[*ROWS, row]).check()
    sft = task(tmp_path, rows=[*ROWS, row], max_bad_rows=1)
    sft.check()
    assert "1 bad rows skipped" in sft.describe()["data"]


def test_text_files_have_no_conversations(tmp_path):
    (tmp_path / "b.txt").write_text("hello")
    with pytest.raises(DataError, match=r"b\.txt has no rows: give \.jsonl or \.parquet"):
        task(tmp_path, files=[str(tmp_path / "b.txt")]).check()


def test_the_library_is_a_conversation(tmp_path):
    sft = task(tmp_path, files=None, format="text")
    with pytest.raises(ValueError, match="data.format=text is not one of auto, docstrings"):
        sft.check()


def test_workers_that_start_afresh_get_the_data_and_not_the_template(tmp_path):
    sft = task(tmp_path)
    sft.check()
    samples, collate = pickle.loads(pickle.dumps((sft.train_samples(), sft.collate)))
    theirs, ours = collate([samples[1]]), sft.collate([sft.train_samples()[1]])
    assert (theirs["labels_BS"] == ours["labels_BS"]).all()
    assert samples.fingerprint() == sft.train_samples().fingerprint()
