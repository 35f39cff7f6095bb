import sys

import pytest

from trainer.watch.stall import LEAST, Stalls, grouped, innermost


def stalls(tmp_path, *reports, factor=10.0):
    made = Stalls(factor, tmp_path / "stalls", 0, 1, lambda: None, print)
    made.close()  # the thread; the rest is arithmetic
    for seconds in reports:
        made.report(seconds)
    return made


def since(made):
    return made._since


@pytest.mark.parametrize(
    ("reports", "ahead", "seconds", "late"),
    [
        ((9.0, 2.0, 2.0), 0, 19.0, False),  # the first report counts for nothing
        ((9.0, 2.0, 2.0), 0, 21.0, True),
        ((9.0, 2.0, 2.0), 5, 29.0, False),  # five steps are queued, or done
        ((9.0, 2.0, 2.0), 5, 31.0, True),
        ((0.1, 0.1, 0.1), 0, LEAST - 1, False),
        ((0.1, 0.1, 0.1), 0, LEAST + 1, True),
        ((2.0, 2.0), 0, 1000.0, False),  # no median yet
    ],
)
def test_when_a_step_is_late(reports, ahead, seconds, late, tmp_path):
    made = stalls(tmp_path, *reports)
    for number in range(ahead):
        made.step(number)
    assert (made.late(since(made) + seconds) is not None) == late


def test_saving_and_evaluation_are_no_steps(tmp_path):
    made = stalls(tmp_path, 1.0, 1.0, 1.0)
    made.pause()
    assert made.late(since(made) + 1000) is None
    made.report(1.0)
    assert made.late(since(made) + 1000) is not None


def test_ranks_that_say_the_same_are_one_line():
    lines = ["waits"] * 9
    lines[3], lines[4] = "computes", "silent"
    assert grouped(lines) == ["ranks 0-2, 5-8: waits", "rank 3: computes", "rank 4: silent"]


def test_where_a_stack_is_in_our_code():
    frame = None

    def deep(_a, _b=None):
        nonlocal frame
        frame = sys._getframe()
        return 0

    from trainer.guard import describe

    class Odd(list):
        def __getitem__(self, item):
            deep(item)
            return super().__getitem__(item)

    describe(Odd([1, 2]))
    assert innermost(frame).startswith("describe (trainer/guard.py:")
    assert innermost(None) == "outside our code"
