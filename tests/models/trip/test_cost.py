import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.trip.config import TripConfig
from models.trip.cost import training_flops
from models.trip.model import Trip

STATES = {"summaries": 0, "token_layers": 2, "keys": ["tokens"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"summaries": 0, "token_layers": 2},
        {},
        {"upper_layers": 3, "summaries": 2},
        {"keys": ["items", "tokens"]},
        {"keys": ["summaries"]},
        {"keys": ["items", "tokens", "summaries"], "read": "apart"},
        {"keys": ["items", "tokens"], "read": "gated", "summaries": 0},
        {"pooling": "mean", "token_layers": 0},
        {"pooling": "din", "token_layers": 0, "summaries": 0},
        {"pooling": "tin"},
        {"pooling": "last", **STATES},
        {"pooling": "appended", "layer": "hstu", **STATES},
        {"pooling": "flat", "layer": "bst", **STATES},
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(changes):
    config = TripConfig(max_history=40, reconstruction=0.0, **changes)
    with torch.device("meta"):
        model = Trip(config, num_items=50, num_behaviours=0, groups=5)
        batch = [torch.zeros(8, 40, dtype=torch.long) for _ in range(5)]
        targets = torch.zeros(8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(*batch, targets)
    assert training_flops(config, 5) == pytest.approx(3 * counter.get_total_flops() / 8, rel=0.03)


def test_hiding_items_costs_a_second_pass_of_the_token_layers():
    plain, hiding = (training_flops(TripConfig(reconstruction=r), 5) for r in (0.0, 0.3))
    bare = training_flops(TripConfig(token_layers=0, reconstruction=0.0), 5)
    assert hiding - plain == pytest.approx(plain - bare)
