import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from models.trip.attention import Visibility, attend, attend_dense, attend_flex, rotate
from models.trip.biases import AlibiBias, HstuBias, LearnedMask

B, H, N, E = 3, 2, 12, 8
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


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


def make_ages():
    ascending = torch.randint(1, 10**7, (B, N), generator=torch.Generator().manual_seed(2))
    return ascending.sort(descending=True).values


def visible(order, valid):
    return Visibility(order, valid, groups(), make_ages())


def bidirectional():
    return visible(torch.zeros(B, N, dtype=torch.long), all_there())


BIASES = [lambda: AlibiBias(H), lambda: HstuBias(N + 2), lambda: LearnedMask(H)]


def started(make):
    torch.manual_seed(0)
    bias = make()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    return bias


def test_one_group_is_bidirectional_attention(qkv):
    out = attend(*qkv, bidirectional())
    torch.testing.assert_close(out, sdpa(*qkv))


def test_one_item_a_group_is_causal_attention(qkv):
    order = torch.arange(N - 1, -1, -1).expand(B, N)
    out = attend(*qkv, visible(order, all_there()))
    torch.testing.assert_close(out, sdpa(*qkv, is_causal=True))


def test_the_rule_entry_by_entry():
    sees = visible(groups(), ragged()).dense
    for b in range(B):
        for i in range(N):
            for j in range(N):
                allowed = ragged()[b, j] and groups()[b, j] >= groups()[b, i]
                assert sees[b, 0, i, j] == (allowed or i == j)


@pytest.mark.parametrize("make", [lambda: None, *BIASES], ids=["none", "alibi", "hstu", "learned"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_flex_attention_gives_what_the_dense_mask_gives(qkv, make, device):
    """And on a GPU (the CPU has no backward pass of it) the same gradients, of biases, too."""
    train, found = device == "cuda", []
    for attention in (attend_dense, attend_flex):
        q, k, v = (x.float().to(device).requires_grad_(train) for x in qkv)
        bias = None if make() is None else started(make).to(device).requires_grad_(train)
        rule = (groups(), ragged(), groups(), make_ages())
        sees = Visibility(*(x.to(device) for x in rule))
        out = attention(q, k, v, sees, None if bias is None else bias(sees))
        found.append([out])
        if train:
            out.square().sum().backward()
            found[-1] += [x.grad for x in (q, k, v, *(bias.parameters() if bias else ()))]
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        summed = {
            "rtol": 2e-5,
            "atol": 2e-5,
        }  # a bias's gradient is a sum of thousands, in any order
        torch.testing.assert_close(one, other, **(summed if number > 3 else {}))


def biased(qkv, score):
    """Softmax attention with a number added to each score, entry by entry."""
    q, k, v = qkv
    scores = q @ k.transpose(2, 3) / E**0.5
    for b in range(B):
        for h in range(H):
            for i in range(N):
                for j in range(N):
                    scores[b, h, i, j] += score(b, h, i, j)
    return scores.softmax(3) @ v


def test_alibi_takes_a_slope_of_the_distance(qkv):
    sees = bidirectional()
    expected = biased(qkv, lambda b, h, i, j: -(2 ** -(4 + 4 * h)) * abs(i - j))
    torch.testing.assert_close(attend(*qkv, sees, AlibiBias(H)(sees)), expected)


def test_hstus_bias_is_that_of_places_and_of_times_to_the_next_item(qkv):
    bias, sees, ages = started(lambda: HstuBias(N + 2)).double(), bidirectional(), make_ages()

    def score(b, h, i, j):
        following = ages[b, i + 1].item() if i + 1 < N else 0
        bucket = min(int(math.log(max(1, abs(ages[b, j].item() - following))) / 0.301), 128)
        return bias.places_P[i - j + N + 1].item() + bias.times_T[bucket].item()

    torch.testing.assert_close(attend(*qkv, sees, bias(sees)), biased(qkv, score))


def test_a_learned_mask_is_a_mixture_of_the_three(qkv):
    """Keys weigh as much as the share of the masks that show them."""
    bias, sees = started(lambda: LearnedMask(H)).double(), bidirectional()
    shares = bias.shares_H3.softmax(1).tolist()
    newest = torch.arange(N - 1, -1, -1).expand(B, N)
    masks = [visible(order, all_there()).dense for order in (groups(), 0 * newest, newest)]

    def score(b, h, i, j):
        return math.log(
            sum(s * m[b, 0, i, j].item() for s, m in zip(shares[h], masks, strict=True))
        )

    torch.testing.assert_close(attend(*qkv, sees, bias(sees)), biased(qkv, score))


@pytest.mark.parametrize("share", range(3))
def test_a_learned_mask_can_become_each_of_the_three(qkv, share):
    bias, sees = started(lambda: LearnedMask(H)).double(), bidirectional()
    newest = torch.arange(N - 1, -1, -1).expand(B, N)
    order = (groups(), 0 * newest, newest)[share]
    with torch.no_grad():
        bias.shares_H3.copy_(50.0 * torch.eye(3)[share].expand(H, 3))
    expected = attend(*qkv, visible(order, all_there()))
    torch.testing.assert_close(attend(*qkv, sees, bias(sees)), expected)


def test_rotary_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, E, generator=generator).expand(2, 1, 1, N, E).unbind()
    scores = (rotate(q) @ rotate(k).transpose(2, 3))[0, 0]
    for shift in range(1, N):
        torch.testing.assert_close(scores.diagonal(shift), scores[0, shift].expand(N - shift))
    assert not torch.allclose(scores[0, 1], scores[0, 5])


@pytest.mark.parametrize("length", [100, 300, 512])
def test_blocks_of_the_mask_are_those_of_asking_for_every_pair(length):
    from torch.nn.attention.flex_attention import create_block_mask

    generator = torch.Generator().manual_seed(length)
    order = torch.randint(4, (3, length), generator=generator).sort(descending=True).values
    order[2] = order[2, torch.randperm(length, generator=generator)]  # in any order
    valid = torch.arange(length) >= torch.tensor([[0], [length // 2], [length - 1]])
    sees = Visibility(order, valid, order, order)
    found = sees.block_mask
    rule = lambda b, h, q, k: sees.sees(b, h, q, k)  # noqa: E731
    asked = create_block_mask(rule, 3, None, length, length, device="cpu")
    # what is whole for sure may be taken for a part of it, not the other way around
    whole, whole_asked = (blocks(m.full_kv_num_blocks, m.full_kv_indices) for m in (found, asked))
    assert not (whole & ~whole_asked).any()
    some, some_asked = (blocks(m.kv_num_blocks, m.kv_indices) for m in (found, asked))
    assert torch.equal(some | whole, some_asked | whole_asked)
    assert not (some & whole).any()


def blocks(counts, indices):
    """Which blocks of keys are listed for which of queries."""
    listed = torch.arange(indices.shape[3]) < counts[..., None]
    table = torch.zeros(indices.shape, dtype=torch.bool)
    return table.scatter(3, indices.long(), listed)
