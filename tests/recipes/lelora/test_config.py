import pytest

from recipes.lelora.config import LeloraConfig, PolicyConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "loar"}, "lelora.method=loar is not one of .*: set lelora.method="),
        ({"rank": 3}, "lelora.rank=3 is not among lelora.widths"),
        ({"scales": [0.5, 2.0]}, "lacks 1.0: add it to lelora.scales"),
        ({"scales": [0.0, 1.0]}, "scales above 0"),
        ({"until": 2}, "lelora.until=2: set lelora.until between 0 and 1"),
        ({"window": "gaussian", "param": "left"}, "lelora.window=gaussian has directions for"),
        ({"actions": ["ranks"]}, "an entry of lelora.actions=ranks is not one of rank"),
        ({"meta_share": 0.0}, "set lelora.meta_share between 0 and 1"),
    ],
)
def test_values_that_cannot_be_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        LeloraConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dim": 10}, "set lelora.policy.dim to a multiple of 4"),
        ({"hold": 1.0}, "set lelora.policy.hold between 0 and 1"),
        ({"entropy": [0.1]}, "set lelora.policy.entropy to two numbers"),
        ({"candidates": 1}, "lelora.policy.candidates=1 is too small"),
    ],
)
def test_policies_that_cannot_be_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        PolicyConfig(**settings)
