"""Ranks that divide a table train as one process does."""

from dataclasses import replace

import pytest

from parallel.tables import exchange
from tests.parallel.tables.rows import Case, check_rows
from tests.ranks import run_ranks

pytest.importorskip("torchrec")

CASES = [
    Case(12),
    Case(13),  # the last rank has fewer
    Case(40, lowest=25),  # nobody asks for rows of the first ranks
    Case(9, empty=True),
    Case(3),  # with four ranks, one has none
]


def test_two_ranks_divide_tables_as_if_they_were_one_process():
    check(2, CASES)


def test_four_ranks_divide_tables_with_copies_of_the_rest_and_without():
    check(4, [*CASES, Case(13, settings={"replicate": 2})])


def test_torchrec_is_as_it_was_tested():
    """Fails where a new torchrec has changed what is used of it."""
    exchange.check()


class Changed:
    """Made without the number of features."""

    def __init__(self, pg, device):
        pass

    def forward(self, local_embs, sharding_ctx):
        pass


def test_a_torchrec_that_has_changed_is_refused_before_it_is_used(monkeypatch):
    parts = replace(exchange._parts(), rows=Changed)
    monkeypatch.setattr(exchange, "_parts", lambda: parts)
    with pytest.raises(RuntimeError, match=r"torchrec 1\S+ has changed Changed, .* num_features"):
        exchange.check()


def check(world, cases):
    """Every rank agrees, and first weights do not depend on the ranks."""
    results = run_ranks(world, check_rows, cases)
    assert all(each == results[0] for each in results)
