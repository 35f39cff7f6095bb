from dataclasses import replace

import pytest
import torch

from models.trip.config import TripConfig
from models.trip.encodings import FactorizedRankEncoding, rank_encoding, sinusoidal
from models.trip.model import Trip, init_weights
from models.trip.reconstruction import (
    Candidates,
    Urn,
    choose_masked,
    everything,
    reconstruction_loss,
)

V, N, GROUPS = 30, 10, 4


def make(seed=0, **changes):
    config = TripConfig(hidden_size=16, max_history=N, dropout=0.0, **changes)
    torch.manual_seed(seed)
    model = Trip(config, num_items=V, num_behaviours=3, groups=GROUPS).double()
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            init_weights(module)
    with torch.no_grad():  # far from the start, so that every part has an effect
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def make_batch(B=4, seed=0, lengths=(N, 6, 1, 0)):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    there = torch.arange(N) >= N - torch.tensor(lengths)[:, None]
    ages = draw(0, 10**6, B, N).sort(descending=True).values
    return {
        "items_BN": draw(2, V, B, N) * there,
        "behaviours_BN": draw(0, 4, B, N) * there,
        "ages_BN": ages * there,
        "buckets_BN": ages % 112 * there,
        "groups_BN": (ages * GROUPS // 10**6) * there,
        "targets_B": draw(2, V, B),
    }


def permuted(batch, row, order):
    """The batch with the items of one row in another order, with their times."""
    moved = {name: value.clone() for name, value in batch.items()}
    for name in ("items_BN", "behaviours_BN", "ages_BN", "buckets_BN", "groups_BN"):
        moved[name][row] = moved[name][row][order]
    return moved


def an_order_inside_groups(groups):
    """Every group of the row turned around."""
    order = torch.arange(len(groups))
    for number in groups.unique():
        order[groups == number] = order[groups == number].flip(0)
    return order


def test_the_order_inside_a_group_has_no_effect_without_ranks():
    batch = make_batch()
    order = an_order_inside_groups(batch["groups_BN"][0])
    assert order.tolist() != list(range(N))
    other = permuted(batch, 0, order)
    for summaries in (0, 2):
        plain = make(rank="none", summaries=summaries)
        torch.testing.assert_close(plain(**batch).logits_B, plain(**other).logits_B)
    for rank in ("fre", "learned", "sinusoidal"):
        ranked = make(rank=rank)
        assert not torch.allclose(ranked(**batch).logits_B[0], ranked(**other).logits_B[0])


@pytest.mark.parametrize(("mask", "one_each"), [("bidirectional", False), ("causal", True)])
def test_groups_of_all_and_of_one_are_the_two_usual_masks(mask, one_each):
    """The whole model, without summaries, which read groups too."""
    batch = make_batch()
    place_N = torch.arange(N - 1, -1, -1) if one_each else torch.zeros(N, dtype=torch.long)
    batch["groups_BN"] = place_N.expand(4, N)
    grouped, usual = (
        make(mask=name, token_layers=2, summaries=0)(**batch).logits_B for name in ("group", mask)
    )
    torch.testing.assert_close(grouped, usual)
    other = make(
        mask="causal" if mask != "causal" else "bidirectional", token_layers=2, summaries=0
    )
    assert not torch.allclose(grouped, other(**batch).logits_B)


@pytest.mark.parametrize("mask", ["group", "causal", "bidirectional"])
def test_newer_groups_reach_older_ones_only_if_the_mask_lets_them(mask):
    model, batch = make(mask=mask, token_layers=2), make_batch()
    seen = []
    model.layers[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    groups = batch["groups_BN"][0]
    changed = {name: value.clone() for name, value in batch.items()}
    newest = groups == groups.min()
    changed["items_BN"][0, newest] = changed["items_BN"][0, newest] % (V - 2) + 2
    changed["buckets_BN"][0, newest] = 111
    model(**batch), model(**changed)
    older = groups > groups.min()
    same = torch.equal(seen[0][0, older], seen[1][0, older])
    assert same == (mask != "bidirectional")
    assert not torch.allclose(seen[0][0, ~older], seen[1][0, ~older])


def test_newer_groups_do_not_reach_older_summaries():
    model, batch = make(upper_layers=2), make_batch()
    seen = []
    model.upper[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    changed = {name: value.clone() for name, value in batch.items()}
    groups = batch["groups_BN"][0]
    changed["items_BN"][0, groups == groups.min()] = 2
    model(**batch), model(**changed)
    newest = int(groups.min())
    torch.testing.assert_close(seen[0][0, newest + 1 : GROUPS], seen[1][0, newest + 1 : GROUPS])
    assert not torch.allclose(seen[0][0, newest], seen[1][0, newest])
    assert not torch.allclose(seen[0][0, -1], seen[1][0, -1])  # the target sees all


def test_padding_has_no_effect():
    """More of it changes nothing, and neither do its other numbers."""
    model, batch = make(), make_batch()
    short = {k: v[1:, 4:] if v.dim() == 2 else v[1:] for k, v in batch.items()}  # lengths 6, 1, 0
    noisy = {name: value.clone() for name, value in batch.items()}
    for name in ("behaviours_BN", "ages_BN", "buckets_BN", "groups_BN"):
        noisy[name][batch["items_BN"] == 0] = 3
    expected = model(**batch)
    torch.testing.assert_close(model(**short).logits_B, expected.logits_B[1:])
    torch.testing.assert_close(model(**noisy).logits_B, expected.logits_B)
    assert expected.weights_BN[batch["items_BN"] == 0].eq(0).all()
    assert expected.logits_B.isfinite().all()  # an empty history, too


STATES = {"token_layers": 2, "summaries": 0, "keys": ["tokens"], "reconstruction": 0.0}
BASELINES = [
    *({"rank": rank, "time": "none"} for rank in ("none", "learned", "sinusoidal", "fre")),
    {"rank": "none", "time": "trte"},
    {"rank": "none", "time": "tin"},
    {"rank_gate": True, "rank_start": "random"},
    {"rank": "learned", "rank_start": "waves"},
    *(
        {"rank": "none", "time": "none", "relative": relative}
        for relative in ("rope", "alibi", "hstu")
    ),
    {"token_layers": 0, "reconstruction": 0.0, "summaries": 0},
    {"token_layers": 0, "reconstruction": 0.0, "summaries": 2, "upper_layers": 0},
    *({"pooling": pooling} for pooling in ("mean", "din", "tin")),
    {"pooling": "last", **STATES},
    {"pooling": "appended", "layer": "hstu", "relative": "hstu", **STATES},
    {"pooling": "flat", "layer": "bst", "time": "tin", **STATES},
    {"pooling": "din", "verdict": "plain", "behaviours": False},
    {"keys": ["items"], "summaries": 0},
    {"keys": ["items", "tokens", "summaries"]},
    {"keys": ["summaries"], "reconstruction": 0.0},
    {"keys": ["items", "tokens", "summaries"], "read": "apart"},
    {"keys": ["items", "summaries"], "read": "gated"},
    {"keys": ["items", "tokens"], "summaries": 0, "read": "apart", "pooling": "mean"},
]


@pytest.mark.parametrize("changes", BASELINES, ids=str)
@pytest.mark.parametrize("mask", ["group", "causal", "bidirectional", "learned"])
def test_every_combination_trains_all_of_its_parameters(changes, mask):
    model = make(mask=mask, **changes).train()
    batch = make_batch()
    masked = None
    if model.reconstruct is not None:
        valid = batch["items_BN"] > 0
        masked = choose_masked(batch["groups_BN"], valid, 0.3, torch.rand(4, N))
    out = model(**batch, masked_RM=masked)
    loss = out.logits_B.square().sum()
    if out.nats_R is not None:
        loss = loss + out.nats_R.sum()
    loss.backward()
    idle = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    if mask == "learned" and model.config.pooling in ("last", "appended"):
        # the last layer's newest state, which alone is read, sees all whatever the shares
        idle -= {n for n in idle if n.startswith("layers.1.") and n.endswith("shares_H3")}
    assert not idle


def test_rope_and_alibi_know_places_and_nope_does_not():
    batch = make_batch()
    batch["groups_BN"].zero_()
    for relative, knows in (("none", False), ("rope", True), ("alibi", True)):
        model = make(rank="none", time="none", relative=relative)
        # turning a history around keeps distances: compare another order, which does not
        moved = permuted(batch, 0, torch.arange(N).roll(3))
        same = torch.allclose(model(**batch).logits_B[0], model(**moved).logits_B[0])
        assert same != knows, relative


def test_mean_pooling_weighs_every_item_the_same():
    model = make(pooling="mean", summaries=0)
    weights = model(**make_batch()).weights_BN
    torch.testing.assert_close(weights[1, -6:], torch.full((6,), 1 / 7).double())  # and nothing's


@pytest.mark.parametrize("read", ["apart", "gated"])
def test_the_head_over_embeddings_is_contained_where_kinds_are_read_apart(read):
    """Whatever the other parts are, last layers (or shares) that pass them over leave that head."""
    whole = make(1, keys=["items", "tokens", "summaries"], read=read)
    plain = make(2, token_layers=0, summaries=0, reconstruction=0.0)
    D, findings = 16, 4  # three kinds, and the target's state above the summaries
    given = plain.state_dict()
    looks = ("nothing_D", "key_norm", "query", "key_DD", "value_DD", "value_D")
    renamed = {
        name.replace("head.", "head.looks.0.")
        if name.startswith(tuple(f"head.{part}" for part in looks))
        else name: value
        for name, value in given.items()
    }
    if read == "apart":  # what the last layers read: findings, the target, their products with it
        narrow = renamed["head.verdict.up.weight"]
        wide = narrow.new_zeros(2 * D, (1 + 2 * findings) * D)
        for to, source in ((0, 0), (findings * D, D), ((1 + findings) * D, 2 * D)):
            wide[:, to : to + D] = narrow[:, source : source + D]
        renamed["head.verdict.up.weight"] = wide
    else:
        renamed["head.gate.weight"] = given["items.rows_VD"].new_zeros(findings, D)
        renamed["head.gate.bias"] = given["items.rows_VD"].new_tensor([1e4, 0, 0, 0])
    batch = make_batch()
    before = whole(**batch)
    assert before.weights_BN.sum(1).max() <= 1
    assert not torch.allclose(before.logits_B, plain(**batch).logits_B)
    assert not whole.load_state_dict(renamed, strict=False).unexpected_keys
    torch.testing.assert_close(whole(**batch).logits_B, plain(**batch).logits_B)


def test_factorized_ranks_start_as_the_nearest_table_of_that_rank():
    config = TripConfig(max_history=20, rank_factors=6, hidden_size=16)
    encoding, target = FactorizedRankEncoding(config), torch.zeros(1, 16)
    encoding.reset_parameters()
    assert sum(p.numel() for p in encoding.parameters()) == 6 * (20 + 16)
    table = sinusoidal(20, 16, torch.device("cpu")).double() * 0.02 * 2**0.5
    got = encoding(20, target).flip(0).double()
    best = torch.linalg.svdvals(table)[6:].square().sum().sqrt()
    assert (got - table).norm().item() == pytest.approx(best.item(), rel=1e-3)
    torch.testing.assert_close(
        encoding(5, target), encoding(20, target)[-5:]
    )  # counted from the newest


@pytest.mark.parametrize("rank", ["learned", "sinusoidal", "fre"])
def test_places_may_start_at_waves_of_size_one(rank):
    config = TripConfig(max_history=20, rank_factors=16, hidden_size=16, rank=rank)
    waves = rank_encoding(replace(config, rank_start="waves"))
    waves.reset_parameters()
    table = sinusoidal(20, 16, torch.device("cpu")).flip(0)  # counted from the newest
    torch.testing.assert_close(waves(20, torch.zeros(1, 16)).detach(), table)


def test_the_target_weighs_the_factors_of_the_ranks_by_one_at_first():
    plain, gated = (
        FactorizedRankEncoding(TripConfig(max_history=7, hidden_size=16, rank_gate=gate))
        for gate in (False, True)
    )
    plain.reset_parameters(), gated.reset_parameters()
    targets = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    same = plain(7, targets).expand(2, 7, 16)
    torch.testing.assert_close(gated(7, targets), same)
    torch.nn.init.normal_(gated.gate_KD)
    for target, found in zip(targets, gated(7, targets), strict=True):
        weights = [2 / (1 + (-(row @ target)).exp()) for row in gated.gate_KD]
        for place in range(7):
            terms = zip(weights, gated.places_NK[place], gated.directions_KD, strict=True)
            torch.testing.assert_close(found[6 - place], sum(w * u * v for w, u, v in terms))


def test_random_ranks_start_as_large_as_items_are():
    config = TripConfig(max_history=400, hidden_size=64, rank_start="random")
    encoding = FactorizedRankEncoding(config)
    torch.manual_seed(0)
    encoding.reset_parameters()
    assert encoding(400, torch.zeros(1, 64)).std().item() == pytest.approx(0.02, rel=0.2)


def test_a_head_that_reads_items_is_no_other_for_layers_that_only_reconstruct():
    """The baseline with the same loss: its click knows nothing of the token layers."""
    batch = make_batch()
    parts = {"summaries": 0, "rank": "none", "time": "none"}
    model = make(keys=["items"], **parts)
    alone = make(token_layers=0, reconstruction=0.0, **parts)
    alone.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(**batch).logits_B, alone(**batch).logits_B)
    masked = torch.tensor([[0, 3], [5, -1], [-1, -1], [-1, -1]])
    both = model(**batch, masked_RM=masked)
    torch.testing.assert_close(both.logits_B, alone(**batch).logits_B)
    reading = make(**parts)  # the same guesses as where the click reads the layers, too
    reading.load_state_dict(model.state_dict(), strict=False)
    expected = reading(**batch, masked_RM=masked).nats_R
    torch.testing.assert_close(both.nats_R[:2], expected[:2])


def test_some_histories_are_reconstructed_as_they_are_among_all():
    model, batch = make(mask="learned"), make_batch()
    masked = torch.tensor([[0, 3], [5, -1], [1, 2], [2, -1]])
    whole, some = model(**batch, masked_RM=masked), model(**batch, masked_RM=masked[:2])
    torch.testing.assert_close(some.nats_R, whole.nats_R[:2])
    torch.testing.assert_close(some.logits_B, whole.logits_B)
    reading = make(keys=["items"], summaries=0)  # whose click knows nothing of the layers
    expected = reading(**batch, masked_RM=masked).nats_R[:2]
    torch.testing.assert_close(reading(**batch, masked_RM=masked[:2]).nats_R, expected)


def test_hidden_items_have_company_and_are_the_wanted_share():
    batch = make_batch(lengths=(N, N, 1, 0))
    groups, valid = batch["groups_BN"], batch["items_BN"] > 0
    groups[1] = torch.tensor([3, 2, 2, 2, 2, 2, 1, 0, 0, 0])  # 8 have company
    places = choose_masked(groups, valid, 0.4, torch.rand(4, N))
    assert places.shape == (4, 4)
    chosen = places[1][places[1] >= 0]
    assert len(chosen) == len(set(chosen.tolist())) == 3  # 0.4 of 8
    assert not set(chosen.tolist()) & {0, 6}
    assert (places[2:] == -1).all()  # alone, and empty
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(4, (50, N), generator=generator).sort(descending=True).values
    valid = torch.rand(50, N, generator=generator) < 0.6  # items that training lacks are between
    chosen = choose_masked(groups, valid, 0.99, torch.rand(50, N))
    same = (groups[:, :, None] == groups[:, None]) & valid[:, None] & valid[:, :, None]
    for row, found in zip(same, chosen, strict=True):
        assert set(found[found >= 0].tolist()) == set((row.sum(0) > 1).nonzero()[:, 0].tolist())


def test_hiding_replaces_just_the_hidden_items_and_leaves_the_click_alone():
    model, batch = make(), make_batch()
    guesses = []
    model.reconstruct.register_forward_hook(lambda module, inputs, out: guesses.append(out))
    masked = torch.tensor([[0, 3], [5, -1], [-1, -1], [-1, -1]])
    first, second = model(**batch), model(**batch, masked_RM=masked)
    torch.testing.assert_close(first.logits_B, second.logits_B)
    other = {name: value.clone() for name, value in batch.items()}
    other["items_BN"][0, 0] = other["items_BN"][0, 0] % (V - 2) + 2
    other["behaviours_BN"][0, 0] = (other["behaviours_BN"][0, 0] + 1) % 4
    third = model(**other, masked_RM=masked)
    torch.testing.assert_close(guesses[1][0], guesses[0][0])
    assert not torch.allclose(third.logits_B[0], second.logits_B[0])


def hidden_places(seed=0):
    """Guesses, the item table, and what `told` reads besides."""
    generator = torch.Generator().manual_seed(seed)
    guesses, table = (
        torch.randn(3, 2, 8, generator=generator),
        torch.randn(V, 8, generator=generator),
    )
    items = torch.randint(2, V, (3, N), generator=generator)
    masked = torch.tensor([[1, 4], [7, -1], [-1, -1]])
    targets = torch.tensor([5, int(items[1, 7]), 9])  # the second target was hidden itself
    hidden = items.gather(1, masked.clamp(min=0))
    return guesses, table, hidden, masked >= 0, targets


def told(guesses, table, hidden, counts, targets, *others):
    """The reconstruction loss among `others`, with the rows that a model would have looked up."""
    parts = [(candidates, table[candidates.items_K]) for candidates in others]
    return reconstruction_loss(guesses, table[hidden], hidden, counts, targets, parts)


def test_the_reconstruction_loss_is_the_cross_entropy_of_what_was_hidden(monkeypatch):
    places = guesses, table, hidden, _, targets = hidden_places()
    nats = told(*places, *everything(V, "cpu"))
    logits = guesses @ table.T
    expected = []
    for place in (0, 1):
        row, item = logits[0, place], hidden[0, place]
        kept = (torch.arange(V) > 1) & ((torch.arange(V) != 5) | (item == 5))
        expected.append(row[kept].logsumexp(0) - row[item])
    torch.testing.assert_close(nats[0], torch.stack(expected).mean())
    torch.testing.assert_close(nats[1], -logits[1, 0, 2:].log_softmax(0)[targets[1] - 2])
    assert nats[2] == 0
    monkeypatch.setattr("models.trip.reconstruction.AT_ONCE", 2 * V)  # in parts, the same
    torch.testing.assert_close(told(*places, *everything(V, "cpu")), nats)
    monkeypatch.setattr("models.trip.reconstruction.PART", 7)
    parts = list(everything(V, "cpu"))
    assert len(parts) > 2
    assert torch.cat([part.items_K for part in parts]).sort().values.tolist() == list(range(2, V))
    torch.testing.assert_close(told(*places, *parts), nats)


def test_drawn_candidates_give_the_loss_of_the_catalogue_on_average():
    """The sum of exponentials, of which the loss is the logarithm, has no bias."""
    guesses, table, hidden, counts, targets = hidden_places(1)
    torch.manual_seed(0)
    urn = Urn.of(torch.cat([torch.arange(2, V), torch.randint(2, 8, (3 * V,))]))
    first = guesses[:, :1], table, hidden[:, :1], counts[:, :1], targets
    whole = told(*first, *everything(V, "cpu"))
    sampled = torch.stack([told(*first, urn.draw(40)).exp() for _ in range(4000)])
    error = sampled.std(0) / 4000**0.5
    assert ((sampled.mean(0) - whole.exp()).abs() <= 4 * error + 1e-5).all()
    assert error[0] > 0
    once = Candidates(*(x[2:] for x in (torch.arange(V), torch.zeros(V))))  # nothing is drawn
    places = guesses, table, hidden, counts, targets
    torch.testing.assert_close(told(*places, once), told(*places, *everything(V, "cpu")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "groups"}, "model.mask=groups is not one of bidirectional, causal, group"),
        ({"token_layers": 0}, "set model.token_layers to 1 or more, or model.reconstruction=0"),
        ({"hidden_size": 50}, "set model.hidden_size to a multiple of 4"),
        ({"group_edges": [3, 3]}, "set model.group_edges to ascending ages above 0"),
        ({"dropout": 1.0}, "set model.dropout below 1"),
        ({"keys": ["item"]}, "model.keys=item is not one of items, summaries, tokens"),
        ({"keys": []}, "leave the head nothing to look at"),
        (
            {"keys": ["items"], "summaries": 0, "reconstruction": 0.0},
            "set model.token_layers=0, or add",
        ),
        ({"pooling": "last"}, "set model.summaries=0 and model.keys=[tokens]"),
        (
            {"pooling": "flat", "summaries": 0, "keys": ["tokens"]},
            "set model.reconstruction=0 and model.token_layers to 1 or more",
        ),
        ({"rank": "none", "rank_gate": True}, "set model.rank=fre or model.rank_gate=false"),
        ({"group_edges": [3], "session_gap": 5}, "set one of them"),
        ({"read": "apart", "keys": ["items"]}, "set model.read=together, or more model.keys"),
        ({"read": "gated", "pooling": "din"}, "by model.pooling=target or mean"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match="set |is not one of") as error:
        TripConfig(**changes)
    assert message in str(error.value)
