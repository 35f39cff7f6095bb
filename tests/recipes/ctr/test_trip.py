import json
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.trip.config import TripConfig
from models.trip.history import UNSEEN
from models.trip.serve import Scorer
from parallel.fsdp import parallelize
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.weights import materialize
from recipes.ctr.config import InteractionsConfig
from recipes.ctr.figures import age_bins, length_bins, popularity, seconds
from recipes.ctr.metrics import auc, grouped_auc, log_loss
from recipes.ctr.panels import over_even
from recipes.ctr.targets import Targets
from recipes.trip import FEATURES, INPUTS, TripTask, TripTaskConfig
from tests.ranks import run_ranks
from trainer.compose import run_jobs
from trainer.config import build_config
from trainer.evaluate import evaluate
from trainer.plan import Plan

SMALL = {"hidden_size": 8, "max_history": 12}


def ratings(folder, users=30, rows=500, seed=0):
    """A little file in MovieLens's layout, with many ties."""
    generator = np.random.default_rng(seed)
    columns = [generator.integers(1, n, rows) for n in (users, 25, 6, 60)]
    columns[3] *= 1000
    file = folder / "u.data"
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True)))
    return str(folder)


def make(folder, **changes):
    model = TripConfig(**{**SMALL, **changes})
    data = InteractionsConfig(source="movielens", folder=folder)
    return TripTask(task=TripTaskConfig(), model=model, data=data, seed=0)


def featured(folder):
    """The same interactions, with two features of each item."""
    ratings(folder)
    rows = np.loadtxt(folder / "u.data", dtype=int)
    lines = [f"{u},{i},{r},{t},{'abc'[i % 3]},{i // 10}" for u, i, r, t in rows]
    (folder / "t.csv").write_text("\n".join(["user,item,stars,time,kind,shelf", *lines]))
    keys = {"label_key": "stars", "behaviour_key": "stars", "item_feature_keys": ["kind", "shelf"]}
    data = InteractionsConfig(source="files", files=[str(folder / "t.csv")], **keys)
    model = TripConfig(**SMALL)
    return TripTask(task=TripTaskConfig(), model=model, data=data, seed=0)


def built(task):
    model = task.build_model()
    materialize(model, torch.device("cpu"), task.init_weights, seed=0)
    return model.eval()


def all_figures(world_size, folder, changes):
    """Of an untrained model, as the trainer's own evaluation finds them, and the scores."""
    task = make(folder, **changes)
    model = task.build_model()
    config = ParallelConfig()
    parallelize(model, build_mesh(mesh_shape(config, world_size), "cpu"), config)
    materialize(model, torch.device("cpu"), task.init_weights, seed=3)
    job = SimpleNamespace(
        task=task,
        model=model,
        eval_samples=task.eval_samples(),
        plan=Plan(world_size, {"shard": world_size}, world_size, 7, 1, 7, 1),
        data_rank=torch.distributed.get_rank(),
        config=SimpleNamespace(trainer=SimpleNamespace(eval_samples=None, workers=0)),
        device=torch.device("cpu"),
    )
    found = evaluate(job), task.panels()
    train = task.train_samples()
    task.loss(model, task.collate([train[n] for n in range(8)])).backward()
    gradients = [p.grad.full_tensor() if world_size > 1 else p.grad for p in model.parameters()]
    return *found, [g.double().norm().item() for g in gradients]


PARTS = [
    {},
    {"mask": "learned", "relative": "hstu", "rank_gate": True, "time": "tin", "pooling": "din",
     "keys": ["items", "tokens", "summaries"], "reconstruction": 0.0},
    {"layer": "hstu", "relative": "hstu", "mask": "causal", "pooling": "appended", "keys": ["tokens"],
     "summaries": 0, "reconstruction": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("changes", PARTS, ids=["trip", "many parts", "hstu"])
def test_two_ranks_find_the_figures_of_one(tmp_path, changes):
    """In batches of 7: the second rank's last batch is none of its own. And the same gradients."""
    folder = ratings(tmp_path)
    ((alone, panels, gradients),) = run_ranks(1, all_figures, 1, folder, changes)
    assert 0 < len(make(folder).eval_samples()) % (2 * 7) < 7
    both = run_ranks(2, all_figures, 2, folder, changes)
    assert {"auc", "gauc", "logloss", "calibration", "auc_test"} <= set(alone)
    assert ("reconstruction" in alone) == ("reconstruction" not in changes)
    for figures, _, norms in both:
        assert figures == pytest.approx(alone, abs=1e-6)
        if not make(folder, **changes).model_config.reconstruction:  # which hides at random
            assert norms == pytest.approx(gradients, rel=1e-4, abs=1e-7)
    assert json.loads(json.dumps(panels)) == panels  # plain data
    assert [p["title"] for p in both[0][1]] == [p["title"] for p in panels]


def test_figures_are_those_of_the_models_own_scores(tmp_path):
    """Against one forward pass a target, and the metrics on each part's rows."""
    task = make(ratings(tmp_path))
    model, samples = built(task), task.eval_samples()
    sums = {}
    for begin in range(0, len(samples), 16):
        batch = task.collate([samples[n] for n in range(begin, min(begin + 16, len(samples)))])
        with torch.no_grad():
            for name, value in task.evaluate(model, batch).items():
                sums[name] = sums.get(name, 0) + torch.as_tensor(value, dtype=torch.float64)
    found = task.summarize({k: v if v.dim() else v.item() for k, v in sums.items()})
    with torch.no_grad():
        one = [task.collate([samples[n]]) for n in range(len(samples))]
        names = INPUTS
        logits = np.array([model(*(b[n] for n in names)).logits_B.item() for b in one])
    labels = np.array([samples[n].label for n in range(len(samples))])
    users = task.table.users_E[samples.targets.events_T]
    cut = len(task.parts.validation)
    for end, rows in (("", slice(cut)), ("_test", slice(cut, None))):
        assert found[f"auc{end}"] == pytest.approx(auc(logits[rows], labels[rows]), abs=1e-6)
        expected = grouped_auc(logits[rows], labels[rows], users[rows])
        assert found[f"gauc{end}"] == pytest.approx(expected, abs=1e-6)
        assert found[f"logloss{end}"] == pytest.approx(
            log_loss(logits[rows], labels[rows]), abs=1e-6
        )


def test_an_evaluation_may_end_early(tmp_path):
    task = make(ratings(tmp_path), reconstruction=0.0)
    model, samples = built(task), task.eval_samples()
    with torch.no_grad():
        sums = task.evaluate(model, task.collate([samples[n] for n in range(20)]))
    found = task.summarize(sums)
    assert "auc" in found
    assert not any(name.endswith("_test") for name in found)
    assert "reconstruction" not in found


def test_the_loss_does_not_depend_on_how_a_batch_is_split(tmp_path, monkeypatch):
    task = make(ratings(tmp_path))
    model, samples = built(task), task.train_samples()
    fixed = torch.rand(40, 12, generator=torch.Generator().manual_seed(0))
    rows = [samples[n] for n in range(40)]

    def loss(begin, end):
        monkeypatch.setattr(torch, "rand", lambda *_, **__: fixed[begin:end])
        return task.loss(model, task.collate(rows[begin:end]))

    torch.testing.assert_close(loss(0, 40), loss(0, 13) + loss(13, 40))
    assert task.count(task.collate(rows)) == 40


def test_candidates_are_drawn_as_training_has_them(tmp_path):
    folder = ratings(tmp_path)
    assert make(folder).urn is None  # so few items are used whole
    task = make(folder, reconstruction_candidates=4)
    parts = task.parts
    met = parts.vocabulary_I[task.table.items_E[parts.known_E]]
    for item in range(2, parts.num_items):
        expected = ((met == item).sum() + 1) / len(task.urn.items_U)
        assert task.urn.logs_V[item].exp().item() == pytest.approx(expected)
    samples = task.train_samples()
    batch = task.collate([samples[n] for n in range(16)])
    drawn = task._candidates(torch.device("cpu"))
    assert len(drawn.items_K) == 4
    assert drawn.items_K.min() > 1
    loss = task.loss(built(task), batch)
    loss.backward()
    assert loss.isfinite()


def test_rows_that_are_no_items_stay_zero(tmp_path):
    """However long it trains, and though evaluation meets unseen items."""
    task = make(ratings(tmp_path))
    model, samples = built(task).train(), task.train_samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        task.loss(model, task.collate([samples[n] for n in range(32)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not model.items.rows_VD[: UNSEEN + 1].any()
    assert model.items.rows_VD[UNSEEN + 1 :].any(1).all()
    batch = task.collate([samples[n] for n in range(8)])
    batch["items_BN"][:, -1] = UNSEEN
    with torch.no_grad():
        assert task.evaluate(model.eval(), batch)["reconstruction"].isfinite()


def test_time_groups_come_from_training_or_from_the_configuration(tmp_path):
    task = make(ratings(tmp_path), groups=4)
    train = task.train_samples()
    ages = np.concatenate([train[n].ages_n for n in range(len(train))])
    counts = np.bincount(np.searchsorted(task.grouping.edges, ages, side="right"))
    assert len(counts) == 4
    assert counts.min() > 0.15 * len(ages)
    assert make(str(tmp_path), group_edges=[60, 3600]).grouping.edges == (60, 3600)


@pytest.mark.parametrize("features", [False, True])
def test_an_exported_folder_scores_as_the_task_does(tmp_path, features):
    task = featured(tmp_path) if features else make(ratings(tmp_path))
    model = built(task)
    out = tmp_path / "exported"
    out.mkdir()
    words = task.export(
        model, lambda names: {n: model.state_dict()[n] for n in names}, out, Namespace()
    )
    assert words == "24 items"
    scorer, samples, table = Scorer.load(out), task.eval_samples(), task.table
    for row in range(0, len(samples), 9):
        event = samples.targets.events_T[row]
        end = table.first_at_time[event]
        history = [
            (str(table.item_names[table.items_E[e]]), str(table.behaviour_names[table.behaviours_E[e] - 1]),
             int(table.times_E[e]))
            for e in range(table.first_of_user[event], end)
        ]  # fmt: skip
        candidate = str(table.item_names[samples.targets.items_T[row]])
        (chance,) = scorer.score(history, [candidate], int(table.times_E[event]))
        batch = task.collate([samples[row]])
        with torch.no_grad():
            expected = task.logits(model, batch).sigmoid().item()
        assert chance == pytest.approx(expected, abs=1e-6)
    assert len(scorer.score([], ["3", "4", "5"], time=0)) == 3  # a new user
    state = load_file(out / "model.safetensors")
    state["items_VD"] = state.pop("items.rows_VD")  # as older folders have it
    for look in [name.removesuffix("key_DD") for name in state if name.endswith("key_DD")]:
        halves = [state.pop(f"{look}{half}_DD") for half in ("key", "value")]
        state[f"{look}key_value.weight"] = torch.cat(halves)
        offset = state.pop(f"{look}value_D")
        state[f"{look}key_value.bias"] = torch.cat([torch.ones_like(offset), offset])
    save_file(state, out / "model.safetensors")
    assert Scorer.load(out).score(history, [candidate], int(table.times_E[event])) == [chance]


@pytest.mark.parametrize(
    ("history", "candidates", "message"),
    [
        ([("3", "4", 5)], ["77"], "item 77 is unknown: the model knows 24 items"),
        ([("78", "4", 5)], ["3"], "item 78 is unknown"),
        ([("3", "9", 5)], ["3"], "behaviour 9 is unknown: the model knows 1, 2, 3, 4, 5"),
        ([("3", "4", 5), ("4", "4", 4)], ["3"], "times of a history do not ascend: 4 follows 5"),
        ([("3", "4", 100)], ["3"], "an event at 100, and its target is at 100"),
        ([("3", "4", 5.5)], ["3"], "time 5.5 is no whole number of seconds"),
        ([("3", "4", None)], ["3"], "time None is no whole number of seconds"),
        ([("3", "4")], ["3"], "('3', '4') is no event: give item, behaviour (or None) and seconds"),
        ([("3", "4", 5)], [3], "item 3 is no text: names of items are, such as '3'"),
        ([("3", "4", 5)], "34", "candidates are '34': give a list of names"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_error(
    tmp_path_factory, history, candidates, message
):
    folder = tmp_path_factory.mktemp("served")
    task = make(ratings(folder))
    model = built(task)
    task.export(model, lambda names: {n: model.state_dict()[n] for n in names}, folder, Namespace())
    with pytest.raises(ValueError, match="item|behaviour|history|time|candidates") as error:
        Scorer.load(folder).score(history, candidates, time=100)
    assert message in str(error.value)


def test_a_folder_that_was_not_exported_is_named(tmp_path):
    def refused(words):
        with pytest.raises(ValueError, match="is no exported folder") as error:
            Scorer.load(tmp_path / "out")
        assert words in str(error.value)
        assert "\n" not in str(error.value)

    refused("No such file")
    task = make(ratings(tmp_path))
    model = built(task)
    (tmp_path / "out").mkdir()
    read = lambda names: {n: model.state_dict()[n] for n in names}  # noqa: E731
    task.export(model, read, tmp_path / "out", Namespace())
    assert Scorer.load(tmp_path / "out").score([], [], time=0) == []
    about = json.loads((tmp_path / "out" / "trip.json").read_text())
    for changed, words in (
        ({k: v for k, v in about.items() if k != "grouping"}, "it has no 'grouping'"),
        ({**about, "model": {**about["model"], "no_such_part": 1}}, "no_such_part"),
        ({**about, "items": {"3": 900}}, "size mismatch"),
    ):
        (tmp_path / "out" / "trip.json").write_text(json.dumps(changed))
        refused(words)
    (tmp_path / "out" / "trip.json").write_text(json.dumps(about))
    (tmp_path / "out" / "model.safetensors").write_bytes(b"0" * 20)
    refused("")


def test_features_are_added_to_items_in_histories_and_targets(tmp_path):
    """In the end to a model whose items have them inside; also where training never saw the item."""
    task = featured(tmp_path)
    model, samples = built(task), task.eval_samples()
    batch = task.collate([samples[n] for n in range(len(samples))])
    whole = task.at_once(samples, np.arange(len(samples)))
    assert all(torch.equal(whole[name], batch[name]) for name in FEATURES)
    features_IF, vocabulary_I = torch.from_numpy(task.table.features_IF), task.parts.vocabulary_I
    assert model.features_WD.shape[0] == 1 + features_IF.max()
    assert not model.features_WD[0].any()
    every = torch.arange(len(vocabulary_I))
    with torch.no_grad():
        expected = task.logits(model, batch)
        # a plain model with a row for each item of the table
        plain = task.build_model().__class__(
            task.model_config, len(every) + 2, 5, task.grouping.count
        )
        items_VD = torch.zeros(len(every) + 2, SMALL["hidden_size"])
        items_VD[2:] = model.items.rows_VD[vocabulary_I] + model.features_WD[features_IF].sum(1)
        state = {k: v for k, v in model.state_dict().items() if k != "features_WD"}
        plain.load_state_dict({**state, "items.rows_VD": items_VD})
        rows = []
        for number in range(len(samples)):
            event = int(samples.targets.events_T[number])
            items = torch.from_numpy(task.table.items_E[slice(*samples.span(event))]) + 2
            rows.append(torch.nn.functional.pad(items, (SMALL["max_history"] - len(items), 0)))
        own = {**batch, "items_BN": torch.stack(rows),
               "targets_B": torch.from_numpy(samples.targets.items_T) + 2}  # fmt: skip
        torch.testing.assert_close(task.logits(plain.eval(), own), expected)
        without = {**batch, "target_features_BF": torch.zeros_like(batch["target_features_BF"])}
        assert not torch.allclose(task.logits(model, without), expected)


def test_a_sample_in_words(tmp_path):
    task = make(ratings(tmp_path))
    samples = task.train_samples()
    row = int(np.argmax(samples.lengths()))
    first, newest, *_ = task.show(samples[row])
    assert first.startswith("item ")
    assert "before: group" in newest
    assert {"model", "data", "targets", "groups", "histories"} <= set(task.survey())


def test_popularity_counts_training_only():
    def targets(items, labels, kinds):
        columns = (np.array(x) for x in (items, items, labels, kinds))
        return Targets(*columns)

    train = targets([0, 0, 1, 2], [1, 1, 0, 1], [0, 0, 0, 0])
    rates = popularity(train, np.arange(4), 4)
    assert rates.argmax() == 0
    assert rates.argmin() == 1
    assert rates[3] == pytest.approx(0.75)  # never shown: as all items
    drawn = targets([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 2])
    assert popularity(drawn, np.arange(3), 3).tolist() == [2, 1, 0]


def test_bins_at_their_edges():
    bins, names = age_bins(np.array([-1, 0, 59, 60, 86_400, 10**9]))
    assert [names[b] for b in bins] == [
        "no history", "0 s to 1 min", "0 s to 1 min", "1 min to 1 h", "1 d to 7 d", "30 d or more",
    ]  # fmt: skip
    bins, names = length_bins(np.array([0, 1, 4, 5, 50]))
    assert [names[b] for b in bins] == ["0 to 1", "1 to 5", "1 to 5", "5 to 10", "50 or more"]
    assert seconds(5400) == "1.5 h"


def test_even_attention_is_one_everywhere():
    even = np.array([[2.0, 6.0, 0.0], [0.0, 0.0, 0.0]])
    assert over_even(3 * even, even) == [[1.0, 1.0, None], [None, None, None]]
    assert over_even(np.array([[1.0, 1.0]]), np.array([[1.0, 3.0]])) == [
        [2.0, pytest.approx(2 / 3)]
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"mask": "group", "rank": "fre", "token_layers": 1}),
        (("model=transformer", "model.rank=learned"), {"mask": "causal", "rank": "learned"}),
        (("model=mean_pooling",), {"pooling": "mean", "token_layers": 0}),
        (("model=target_attention",), {"pooling": "target", "token_layers": 0, "time": "none"}),
        (("model=target_attention_reconstruction",), {"reconstruction": 0.3, "keys": ["items"]}),
        (("model=din",), {"pooling": "din", "token_layers": 0}),
        (("model=tin",), {"pooling": "tin", "time": "tin", "rank": "none"}),
        (("model=bst",), {"pooling": "flat", "layer": "bst", "mask": "bidirectional"}),
        (("model=sasrec",), {"pooling": "last", "rank": "learned", "mask": "causal"}),
        (("model=hstu",), {"pooling": "appended", "layer": "hstu", "relative": "hstu"}),
    ],
)
def test_the_recipe_and_its_baselines_compose(words, expected):
    found = []
    assert (
        run_jobs(["+recipe=trip", *words], lambda plain, *_: found.append(build_config(plain)) or 0)
        == 0
    )
    (config,) = found
    assert {name: getattr(config.model, name) for name in expected} == expected
    assert (config.task.name, config.data.source) == ("trip", "movielens")
