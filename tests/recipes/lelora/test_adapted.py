"""What a task says of its adapters before anything runs."""

import pytest

from tests.recipes.lelora.toys import make_task, write_texts


def test_a_rank_that_no_matrix_has_is_an_error(tmp_path):
    write_texts(tmp_path)
    with pytest.raises(ValueError, match=r"lelora\.rank=17 is more than the 16 components"):
        make_task(tmp_path, rank=17, widths=[17]).check()
    make_task(tmp_path, rank=16, widths=[16]).check()


def test_a_plan_has_the_decompositions_time_and_memory(tmp_path):
    write_texts(tmp_path)
    task = make_task(tmp_path)
    task.check()
    said = task.describe()["spectra"]
    assert "10 matrices" in said
    assert "minutes of one GPU" in said
    assert "GiB at a time" in said
