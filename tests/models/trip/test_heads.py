"""Heads against their published definitions, history by history, in plain loops."""

import pytest
import torch
from torch.nn.functional import gelu, leaky_relu

from models.trip.config import TripConfig
from models.trip.heads import make_head
from models.trip.model import init_weights
from models.trip.serve import as_now

B, K, D, H = 3, 4, 8, 2


def make(pooling, **changes):
    if pooling in ("last", "appended", "flat"):
        changes |= {"summaries": 0, "keys": ["tokens"]}
    config = TripConfig(
        hidden_size=D, num_heads=H, max_history=K - (pooling in ("appended", "flat")), dropout=0.0,
        pooling=pooling, reconstruction=0.0, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    head = make_head(config).double()
    for module in head.modules():
        if any(True for _ in module.parameters(recurse=False)):
            init_weights(module)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return head


@pytest.fixture
def inputs():
    """Keys, which are there (all, one, none), and targets."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(B, K, D, generator=generator).double()
    shown = torch.arange(K) >= torch.tensor([[0], [K - 1], [K]])
    return keys, shown, torch.randn(B, D, generator=generator).double()


def verdict(head, seen, target):
    joined = torch.cat([seen, target, seen * target])
    return head.down(gelu(head.up(joined)))[0]


def there(shown, b):
    return [k for k in range(K) if shown[b, k]]


def test_dins_weights_are_those_of_its_network_and_no_shares(inputs):
    """Zhou et al. 2018, 4.3: the sum over the history of a(e_j, v_A) e_j, without a softmax."""
    keys, shown, target = inputs
    head = make("din")
    logits, weights = head(*inputs)
    for b in range(B):
        seen = torch.zeros(D).double()
        for k in there(shown, b):
            key, item = keys[b, k], target[b]
            pair = torch.cat([item, key, item - key, item * key])
            weight = head.weight(head.second(head.first(pair).sigmoid()).sigmoid())[0]
            torch.testing.assert_close(weights[b, k], weight)
            seen = seen + weight * key
        torch.testing.assert_close(logits[b], verdict(head.verdict, seen, target[b]))
    assert weights[~shown].eq(0).all()


def test_a_plain_verdict_reads_no_product(inputs):
    _, _, target = inputs
    head = make("din", verdict="plain").verdict
    for seen, item in zip(target.flip(0), target, strict=True):
        expected = head.down(head.up(torch.cat([seen, item])).relu())[0]
        torch.testing.assert_close(head(seen[None], item[None])[0], expected)


def test_tin_puts_the_target_into_attention_and_values(inputs):
    """Zhou et al. 2024, 4: the sum over the history of softmax(<e_i, v_t>) (e_i * v_t)."""
    keys, shown, target = inputs
    head = make("tin")
    logits, weights = head(*inputs)
    for b in range(B):
        seen, total = torch.zeros(D).double(), 0.0
        for k in there(shown, b):
            share = (keys[b, k] @ target[b] / D**0.5).exp()
            seen, total = seen + share * (keys[b, k] * target[b]), total + share
        seen = seen / total if there(shown, b) else seen
        torch.testing.assert_close(logits[b], verdict(head.verdict, seen, target[b]))
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1.0, 0.0]).double())


@pytest.mark.parametrize("pooling", ["target", "mean"])
def test_the_target_attends_to_the_history_and_to_nothing(inputs, pooling):
    keys, shown, target = inputs
    head = make(pooling)
    logits, weights = head(*inputs)
    for b in range(B):
        item = head.target_norm(target[b])
        rows = [*(keys[b, k] for k in there(shown, b)), head.nothing_D]
        normal = head.key_norm(torch.stack(rows))
        value = normal @ head.value_DD.T + head.value_D
        seen, looks = [], []
        for h in range(H):
            part = slice(h * D // H, (h + 1) * D // H)
            scores = torch.zeros(len(rows)).double()
            if pooling == "target":
                key = normal @ head.key_DD[part].T
                scores = key @ head.query(item)[part] / (D // H) ** 0.5
            looks.append(scores.softmax(0))
            seen.append(looks[-1] @ value[:, part])
        torch.testing.assert_close(logits[b], verdict(head.verdict, torch.cat(seen), item))
        torch.testing.assert_close(weights[b, shown[b]], (sum(looks) / H)[:-1])


@pytest.mark.parametrize("read", ["apart", "gated"])
def test_each_kind_of_key_is_asked_by_itself(inputs, read):
    keys, shown, target = inputs
    told = target.flip(1)  # the target's state above the summaries
    head = make("target", read=read, keys=["items", "summaries"])
    kinds = {"items": (keys, shown), "summaries": (keys.flip(0, 1), shown.flip(0))}
    logits, weights = head(kinds, target, told)
    item, state = head.target_norm(target), head.told_norm(told)
    first, first_looks = head.looks[0](*kinds["items"], item)
    second, second_looks = head.looks[1](*kinds["summaries"], state)
    looks = torch.cat([first_looks, second_looks], dim=1)
    findings, last = [first, second, state], head.verdict
    for b in range(B):
        if read == "apart":
            read_by = [*(f[b] for f in findings), item[b], *(f[b] * item[b] for f in findings)]
            expected = last.down(gelu(last.up(torch.cat(read_by))))[0]
            torch.testing.assert_close(weights[b], looks[b] / 2)
        else:
            shares = head.gate(item[b]).softmax(0)
            seen = sum(share * f[b] for share, f in zip(shares, findings, strict=True))
            expected = verdict(last, seen, item[b])
            of = torch.cat([shares[:1].expand(K), shares[1:2].expand(K)])
            torch.testing.assert_close(weights[b], looks[b] * of)
        torch.testing.assert_close(logits[b], expected)


def test_sasrec_multiplies_the_newest_state_with_the_target(inputs):
    keys, shown, target = inputs
    head = make("last")
    logits, _ = head(*inputs)
    for b in range(B):
        score = head.norm(keys[b, -1]) @ target[b] if shown[b, -1] else 0.0
        torch.testing.assert_close(logits[b], score + head.offset[0])


def test_bst_reads_all_states_side_by_side(inputs):
    keys, shown, _ = inputs
    head = make("flat")
    logits, _ = head(*inputs)
    for b in range(B):
        flat = torch.cat([keys[b, k] * shown[b, k] for k in range(K)])
        hidden = leaky_relu(head.second(leaky_relu(head.first(flat))))
        torch.testing.assert_close(logits[b], head.third(hidden)[0])
    short, _ = head(keys[1:, 1:], shown[1:, 1:], inputs[2][1:])  # a batch that is padded to less
    torch.testing.assert_close(short, logits[1:])


def test_the_appended_target_is_judged_by_its_own_state(inputs):
    keys, _, target = inputs
    head = make("appended")
    for b, logit in enumerate(head(*inputs)[0]):
        torch.testing.assert_close(logit, verdict(head.verdict, keys[b, -1], target[b]))


@pytest.mark.parametrize("pooling", ["target", "mean"])
def test_folders_from_before_keys_and_values_were_apart_give_the_same_head(pooling, inputs):
    head = make(pooling)
    old = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    value_DD, value_D = old.pop("head.value_DD"), old.pop("head.value_D")
    key_DD = old.pop("head.key_DD", torch.ones_like(value_DD))
    old["head.key_value.weight"] = torch.cat([key_DD, value_DD])
    old["head.key_value.bias"] = torch.cat([torch.ones_like(value_D), value_D])
    again = make(pooling)
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    again.load_state_dict({n.removeprefix("head."): x for n, x in as_now(old).items()})
    torch.testing.assert_close(again(*inputs), head(*inputs), rtol=0, atol=0)
