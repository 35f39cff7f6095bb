import pytest
import torch

from models.slide.decode import beam_search, greedy_list
from models.slide.graphs import captured
from models.slide.history import pad_left
from models.slide.trie import build_trie
from tests.models.slide.small import small_ids, small_model


def decoders(model, trie):
    return {
        "beam": lambda items, out: beam_search([model], trie, items, 8, out),
        "list": lambda items, out: greedy_list([model], trie, items, 6, out),
    }


def test_without_a_gpu_there_is_no_graph():
    decode = decoders(None, None)["list"]
    nobody = torch.zeros(1, 0, dtype=torch.int64)
    assert captured(decode, nobody, nobody) is decode


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("codes", ["steps", "heads"])
@pytest.mark.parametrize("how", ["beam", "list"])
def test_a_graph_finds_what_single_launches_do(codes, how):
    """For other histories and other exclusions than those it was captured with."""
    device = torch.device("cuda")
    model = small_model(list_length=6, codes=codes).float().to(device)
    decode = decoders(model, build_trie(small_ids(), device))[how]
    first = (pad_left([[1, 2, 3], [4]], 5).to(device), pad_left([[1], []], 2).to(device))
    other = (pad_left([[9], [5, 6, 7, 8, 9]], 5).to(device), pad_left([[], [5, 6]], 2).to(device))
    graph = captured(decode, *first)
    for inputs in (first, other):
        found, expected = graph(*inputs), decode(*inputs)
        assert torch.equal(found.items_BK, expected.items_BK)
        torch.testing.assert_close(found.scores_BK, expected.scores_BK)
