import numpy as np
import pytest

from models.slide.decode import beam_search, greedy_list
from models.slide.folder import write_folder
from models.slide.history import pad_left
from models.slide.serve import Recommender
from tests.models.slide.small import small_ids, small_model, trie_of

HISTORIES = [["i1", "i2", "i3"], ["i5"], [f"i{n}" for n in range(7, 14)]]
NUMBERS = [[int(name[1:]) for name in history] for history in HISTORIES]


def served(folder, list_length):
    ids, model = small_ids(), small_model(list_length=list_length)
    folder.mkdir()
    state = model.state_dict()
    names = [f"i{number}" for number in range(ids.num_items)]
    write_folder(
        folder, model, lambda keys: {k: state[k] for k in keys}, model.config, ids, names, {}
    )
    return Recommender.load(folder), model.float(), trie_of(ids)


@pytest.mark.parametrize("list_length", [0, 4])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("beams", [None, 9])
def test_an_exported_folder_serves_what_the_model_decodes(tmp_path, list_length, again, beams):
    recommender, model, trie = served(tmp_path / "exported", list_length)
    found = recommender.recommend(HISTORIES, length=6, beams=beams, again=again, batch_size=2)
    padded, out = pad_left(NUMBERS, 5), pad_left(NUMBERS, 0 if again else 7)
    if list_length and beams is None:
        lists = greedy_list([model], trie, padded, 6, out)
    else:
        lists = beam_search([model], trie, padded, beams or 50, out)
    expected = lists.items_BK[:, :6].tolist()
    assert [[int(name[1:]) for name, _ in row] for row in found] == expected
    scores = np.array([[score for _, score in row] for row in found])
    np.testing.assert_allclose(scores, lists.scores_BK[:, :6], atol=1e-4)
    if not again:
        assert not any(
            name in history
            for row, history in zip(found, HISTORIES, strict=True)
            for name, _ in row
        )


def test_a_list_ends_where_no_item_is_left(tmp_path):
    recommender, *_ = served(tmp_path / "exported", 4)
    (found,) = recommender.recommend([["i1", "i2"]], length=45)
    assert sorted(name for name, _ in found) == sorted(
        f"i{n}" for n in range(40) if n not in (1, 2)
    )


@pytest.mark.parametrize(
    ("histories", "options", "message"),
    [
        ([["i1"], []], {}, "history 1 is empty: give at least one item"),
        ([["i1"], ["i2", "j"]], {}, "item j of history 1 is unknown: the model knows 40 items"),
        ([["i1"]], {"length": 0}, "length=0, beams=None"),
        ([["i1"]], {"length": 5, "beams": 4}, "beams of length or more"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_error(tmp_path, histories, options, message):
    recommender, *_ = served(tmp_path / "exported", 4)
    with pytest.raises(ValueError, match="empty|unknown|length") as error:
        recommender.recommend(histories, **options)
    assert message in str(error.value)


def test_a_folder_that_was_not_exported_is_named(tmp_path):
    with pytest.raises(ValueError, match="is no exported folder"):
        Recommender.load(tmp_path)
