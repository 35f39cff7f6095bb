"""Whole runs through adapters: resumed, exported, loaded elsewhere."""

import json
from types import SimpleNamespace

import pytest
import torch

from models.lelora.verify import verify
from recipes.lelora.classify import LeloraClassifyConfig, LeloraClassifyTask
from tests.models.lelora.toys import llama
from tests.recipes.lelora.toys import write_texts
from tests.runs.helpers import metrics, train, weights
from trainer.errors import CHECKPOINT, CONFIG, DONE
from trainer.export import export

pytestmark = pytest.mark.slow

LELORA = (
    "lelora.rank=2", "lelora.widths=[0,1,2,4]", "lelora.period=2", "lelora.first=2", "lelora.until=0.7",
    "lelora.meta_share=0.2", "lelora.meta_samples=8", "lelora.min_reliability=-1",
    "lelora.policy.hold=0.3", "lelora.policy.dim=8", "lelora.policy.layers=1", "lelora.max_switched=1",
    "lelora.cache_dir=cache", "trainer.workers=0", "trainer.eval_every=0", "logging.every=1",
    "logging.wandb.mode=disabled", "trainer.batch_size=8", "optim.warmup=0", "optim.lr=0.03",
)  # fmt: skip


def conversations(folder):
    rows = [{"prompt": f"say {n}", "completion": str(n) * 3} for n in range(60)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_sft_is_resumed_bit_for_bit_and_leaves_as_a_lora(tmp_path, monkeypatch, capsys):
    conversations(tmp_path)
    llama(vocab=300).save_pretrained(tmp_path / "base")
    common = [
        "+recipe=lelora_sft", "model=folder", "model.path=base", "data=chat", "data.files=[chat.jsonl]",
        "data.cache_dir=cache", "data.sequence_length=32", "data.holdout=0.0", *LELORA,
    ]  # fmt: skip
    code, output = train(*common, "trainer.steps=8", "checkpoint.every=3", "checkpoint.keep=9",
                         "run.dir=r", cwd=tmp_path)  # fmt: skip
    assert code == 0, output
    rows = [
        json.loads(line) for line in (tmp_path / "r" / "decisions.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["cost"] <= row["budget"] for row in rows)
    code, output = train(*common, "trainer.steps=8", "checkpoint.every=0", "run.dir=again",
                         f"trainer.resume={tmp_path}/r/checkpoints/step-00000003", cwd=tmp_path)  # fmt: skip
    assert code == 0, output
    ours, theirs = weights(tmp_path / "r", 8)[0], weights(tmp_path / "again", 8)[0]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not [name for name in ours if name.endswith("q_proj.weight")], "the base stays out of it"

    monkeypatch.chdir(tmp_path)
    assert export(["r", "adapter"]) == DONE
    assert "LoRA, rank 8 (" in capsys.readouterr().out
    assert export(["r", "merged", "--merge", "--dtype", "float32"]) == DONE
    assert "logits change by up to" in verify(tmp_path / "base", tmp_path / "adapter")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("merged")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained("base")
        adapted = PeftModel.from_pretrained(base, "adapter")(input_ids=ids).logits
    assert (merged - adapted).abs().max() < 1e-4

    llama(vocab=300, hidden_size=32, initializer_range=0.05).save_pretrained(tmp_path / "base")
    code, output = train(*common, "trainer.steps=9", "checkpoint.every=0", "run.dir=other",
                         f"trainer.resume={tmp_path}/r", cwd=tmp_path)  # fmt: skip
    assert code == CHECKPOINT
    assert "its adapters belong to another base model" in output


@pytest.mark.long
def test_pefts_lora_is_resumed_and_leaves(tmp_path, monkeypatch, capsys):
    conversations(tmp_path)
    llama(vocab=300).save_pretrained(tmp_path / "base")
    common = [
        "+recipe=lelora_sft", "model=folder", "model.path=base", "data=chat", "data.files=[chat.jsonl]",
        "data.cache_dir=cache", "data.sequence_length=32", "data.holdout=0.0", *LELORA,
        "lelora.targets=[q_proj,up_proj]",
    ]  # fmt: skip
    for method, steps in (("lora", "checkpoint.every=3"), ("pissa", "checkpoint.every=3")):
        code, output = train(*common, f"lelora.method={method}", "trainer.steps=5", steps,
                             f"run.dir={method}", "checkpoint.keep=9", cwd=tmp_path)  # fmt: skip
        assert code == 0, output
    code, output = train(*common, "lelora.method=pissa", "trainer.steps=5", "run.dir=again",
                         f"trainer.resume={tmp_path}/pissa/checkpoints/step-00000003", cwd=tmp_path)  # fmt: skip
    assert code == 0, output
    ours, theirs = weights(tmp_path / "pissa", 5)[0], weights(tmp_path / "again", 5)[0]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    monkeypatch.chdir(tmp_path)
    assert export(["lora", "adapter"]) == DONE
    assert "logits change by up to" in verify(tmp_path / "base", tmp_path / "adapter")
    assert export(["pissa", "other"]) == CONFIG
    assert "lelora.method=pissa is here to be compared with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method",
    [
        "lelora",
        pytest.param("full", marks=pytest.mark.long),
        pytest.param("head", marks=pytest.mark.long),
    ],
)
def test_texts_are_classified_by_every_method(tmp_path, monkeypatch, capsys, method):
    write_texts(tmp_path)
    tiny = ["model.hidden_size=16", "model.intermediate_size=24", "model.num_heads=2",
            "+model.config.initializer_range=0.2"]  # fmt: skip
    code, output = train(
        "+recipe=lelora_classify", "data=labelled", "data.files=[texts.tsv]", *tiny, *LELORA,
        f"lelora.method={method}", "trainer.steps=8", "run.dir=r", "trainer.eval_every=8",
        "task.probe=0", "task.head_lr=null", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert metrics(tmp_path / "r", "eval")[0]["accuracy"] > 0.1
    assert (tmp_path / "r" / "decisions.jsonl").exists() == (method == "lelora")
    monkeypatch.chdir(tmp_path)
    if method == "lelora":
        panels = json.loads((tmp_path / "r" / "panels.json").read_text())
        titles = [panel["title"] for panel in panels]
        assert "Rows that train" in titles
        assert "Singular values of the base model, over the largest" in titles
        decided = [row for row in metrics(tmp_path / "r", "train") if "lelora_cost" in row]
        assert [row["step"] for row in decided] == [2, 4, 6]
        assert all(row["lelora_cost"] <= row["lelora_budget"] for row in decided)
        assert "lelora_reward" in decided[-1]
        assert export(["r", "adapter"]) == CONFIG
        assert "export with --merge" in capsys.readouterr().err
    assert export(["r", "merged", "--merge", "--dtype", "float32"]) == DONE
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained("merged")
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    saved, _ = weights(tmp_path / "r", 8)
    assert torch.equal(model.classifier.weight, saved["model/classifier.weight"])


def test_a_classifier_that_began_as_a_probe_is_resumed_bit_for_bit(tmp_path):
    write_texts(tmp_path)
    common = ["+recipe=lelora_classify", "data=labelled", "data.files=[texts.tsv]", "trainer.steps=5",
              "model.hidden_size=16", "model.intermediate_size=24", "model.num_heads=2",
              "+model.config.initializer_range=0.2", *LELORA]  # fmt: skip
    code, output = train(
        *common, "checkpoint.every=3", "checkpoint.keep=9", "run.dir=r", cwd=tmp_path
    )
    assert code == 0, output
    # how many texts a probe would have is of no account any more
    code, output = train(*common, "checkpoint.every=0", "run.dir=again", "task.probe=8",
                         f"trainer.resume={tmp_path}/r/checkpoints/step-00000003", cwd=tmp_path)  # fmt: skip
    assert code == 0, output
    ours, theirs = weights(tmp_path / "r", 5)[0], weights(tmp_path / "again", 5)[0]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_resumed_classifier_is_not_fitted_again():
    task = LeloraClassifyTask.__new__(LeloraClassifyTask)  # without a model or texts to fit
    task.config, task._head_is_stored = LeloraClassifyConfig(), False
    task._begin_head(SimpleNamespace(resumed=True))
    with pytest.raises(AttributeError):
        task._begin_head(SimpleNamespace(resumed=False))
