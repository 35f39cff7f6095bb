import pytest

from tests.faults.campaign import LONGEST, undisturbed


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The run that nothing happened to, with all its checkpoints."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "whole", LONGEST)
