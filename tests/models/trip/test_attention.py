import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from models.trip.attention import Visibility, attend, attend_dense, attend_flex, rotate

B, H, N, E = 3, 2, 12, 8


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, B, H, N, E, generator=generator, dtype=torch.float64).unbind()


def all_there():
    return torch.ones(B, N, dtype=torch.bool)


def ragged():
    """Padding on the left: none, a few, all but one."""
    return torch.arange(N) >= torch.tensor([[0], [4], [N - 1]])


def groups():
    ascending = torch.randint(4, (B, N), generator=torch.Generator().manual_seed(1)).sort().values
    return ascending.flip(1)  # the newest, on the right, is in group 0


def test_one_group_is_bidirectional_attention(qkv):
    out = attend(*qkv, Visibility(torch.zeros(B, N, dtype=torch.long), all_there()))
    torch.testing.assert_close(out, sdpa(*qkv))


def test_one_item_a_group_is_causal_attention(qkv):
    order = torch.arange(N - 1, -1, -1).expand(B, N)
    out = attend(*qkv, Visibility(order, all_there()))
    torch.testing.assert_close(out, sdpa(*qkv, is_causal=True))


def test_the_rule_entry_by_entry():
    sees = Visibility(groups(), ragged()).dense
    for b in range(B):
        for i in range(N):
            for j in range(N):
                allowed = ragged()[b, j] and groups()[b, j] >= groups()[b, i]
                assert sees[b, 0, i, j] == (allowed or i == j)


@pytest.mark.parametrize("alibi", [False, True])
def test_flex_attention_gives_what_the_dense_mask_gives(qkv, alibi):
    q, k, v = (x.float() for x in qkv)
    sees = Visibility(groups(), ragged(), alibi)
    torch.testing.assert_close(attend_flex(q, k, v, sees), attend_dense(q, k, v, sees))


def test_alibi_takes_a_slope_of_the_distance(qkv):
    q, k, v = qkv
    scores = q @ k.transpose(2, 3) / E**0.5
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    for head, slope in enumerate((2**-4, 2**-8)):
        scores[:, head] -= slope * distance
    out = attend(*qkv, Visibility(torch.zeros(B, N, dtype=torch.long), all_there(), alibi=True))
    torch.testing.assert_close(out, scores.softmax(3) @ v)


def test_rotary_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, E, generator=generator).expand(2, 1, 1, N, E).unbind()
    scores = (rotate(q) @ rotate(k).transpose(2, 3))[0, 0]
    for shift in range(1, N):
        torch.testing.assert_close(scores.diagonal(shift), scores[0, shift].expand(N - shift))
    assert not torch.allclose(scores[0, 1], scores[0, 5])
