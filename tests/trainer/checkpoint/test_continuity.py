import pytest

from trainer.checkpoint.continuity import DataIdentity, check_epochs, goes_on
from trainer.errors import CheckpointError

THEN = {"step": 40, "seed": 3, "data": "abc", "batch_size": 8}


def test_the_same_data_in_the_same_order_goes_on():
    assert goes_on(THEN, DataIdentity(3, "abc"), change_data=False)
    assert goes_on(THEN, DataIdentity(3, "abc"), change_data=True)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (DataIdentity(4, "abc"), "step 40 was trained on trainer.seed=3, and here it is 4"),
        (DataIdentity(3, "xyz"), "step 40 was trained on other data"),
    ],
)
def test_another_order_is_an_error_unless_asked_for(here, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        goes_on(THEN, here, change_data=False)
    assert "trainer.change_data=true" in str(caught.value)
    assert not goes_on(THEN, here, change_data=True)


def test_batches_may_change_where_steps_do_not_follow_from_them():
    check_epochs(THEN, 16, epochs=None)
    check_epochs(THEN, 8, epochs=2)
    with pytest.raises(CheckpointError, match="set trainer.batch_size=8, or trainer.epochs=null"):
        check_epochs(THEN, 16, epochs=2)
