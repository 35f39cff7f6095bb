"""Packed documents against each by itself, no rows at all, and shapes that cannot be."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from models.hybrid.model import rotate, rotations, whole
from models.hybrid.shape import Shape, pattern
from parallel.recompute import recompute
from tests.models.hybrid.cases import MIXES, gradients, packed, small_model


def loss_of(out, weights_TV):
    """Something that every output has a part in."""
    return (out.logits_TV * weights_TV).sum() + (out.chances_LE * out.visits_LE).sum()


def alone(model, tokens, lengths, weights_TV):
    """The same documents one by one."""
    outs, visits, chances = [], 0, 0
    for part in tokens.split(lengths):
        out = model(part, whole(packed((len(part),))[1]))
        outs.append(out.logits_TV)
        visits, chances = visits + out.visits_LE, chances + out.chances_LE
    return out._replace(logits_TV=torch.cat(outs), visits_LE=visits, chances_LE=chances)


@pytest.mark.parametrize("lengths", MIXES, ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "block", "selective"])
def test_packed_documents_have_the_logits_and_gradients_of_each_alone(lengths, checkpointing):
    model = small_model()
    tokens, documents = packed(lengths)
    weights = torch.randn(len(tokens), 61, dtype=torch.float64)
    expected = alone(model, tokens, lengths, weights)
    loss_of(expected, weights).backward()
    wanted = gradients(model)
    for layer in model.model.layers:
        recompute(layer, checkpointing)
    out = model(tokens, whole(documents))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    loss_of(out, weights).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-10, msg=name)


def test_no_rows_give_every_parameter_a_gradient_of_zero():
    """A rank may have nothing, and still take part in every reduction."""
    model = small_model()
    for kind in ("none", "block"):
        for layer in model.model.layers:
            recompute(layer, kind)
        tokens, documents = packed(())
        out = model(tokens, whole(documents))
        assert out.logits_TV.shape == (0, 61)
        loss_of(out, torch.zeros(0, 61)).backward()
        assert all((grad == 0).all() for grad in gradients(model).values())


def test_a_row_does_not_see_what_comes_after_it_or_another_document():
    model = small_model()
    tokens, documents = packed((20, 30))
    before = model(tokens, whole(documents)).logits_TV
    changed = tokens.clone()
    changed[35] = (changed[35] + 1) % 61
    after = model(changed, whole(documents)).logits_TV
    # not bit for bit: experts get other numbers of rows, and add products in another order
    torch.testing.assert_close(before[:35], after[:35], rtol=0, atol=1e-12)
    assert not torch.allclose(before[35:], after[35:])


def test_layers_attend_through_the_rows_and_in_order():
    model = small_model(kinds=("sliding_window", "full", "block_topk"))
    tokens, documents = packed((9, 4))
    here, asked = whole(documents), []

    def attend(q, k, v, rule):
        asked.append((rule.kind, q.shape, k.shape, v.shape))
        return here.attend(q, k, v, rule)

    rows = type(here)(here.positions_T, attend)
    assert torch.equal(model(tokens, rows).logits_TV, model(tokens, here).logits_TV)
    shapes = ((13, 6, 8), (13, 2, 8), (13, 2, 8))
    assert asked == [(kind, *shapes) for kind in ("sliding_window", "full", "block_topk")]


def test_positions_turn_only_the_kinds_that_are_named():
    tokens, documents = packed((30,))
    here = whole(documents)
    later = type(here)(here.positions_T + 7, here.attend)
    stretched = type(here)(here.positions_T * 2, here.attend)
    for rotary, known in (((), False), (("sliding_window",), True)):
        model = small_model(kinds=("sliding_window", "full"), rotary=rotary)
        logits = model(tokens, here).logits_TV
        torch.testing.assert_close(model(tokens, later).logits_TV, logits)  # only distances count
        assert torch.allclose(model(tokens, stretched).logits_TV, logits) != known


def test_rotations_are_complex_products():
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 7, 1000])
    got = rotate(x, *rotations(positions, 8, 100.0, torch.float64))
    rates = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = torch.complex(*x.chunk(2, dim=2)) * torch.exp(1j * positions[:, None, None] * rates)
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], dim=2))


def test_every_fourth_layer_is_full():
    sparse = ("block_topk",) * 3
    assert pattern(9, 4, "block_topk") == (*sparse, "full", *sparse, "full", "block_topk")
    assert pattern(2, 1, "block_topk") == ("full", "full")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinds": ("full", "window")}, "a kind in model.kinds=window is not one of"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=32"),
        ({"head_dim": 7}, "set model.head_dim to an even number"),
        ({"active_experts": 65}, "set model.active_experts to at most that"),
        ({"expert_size": 12}, "set model.expert_size to a multiple of 8"),
        ({"top_k": 0}, "model.top_k=0 is too small: set model.top_k to 1 or more"),
        ({"router": "tanh"}, "model.router=tanh is not one of sigmoid, softmax"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match="set ") as error:
        Shape(**changes)
    assert words in str(error.value)


def test_a_compiled_block_gives_the_same_and_lengths_compile_it_only_once_more():
    """Traced, but not turned into other code: what is compiled, and how often, is all that counts here."""
    plain, compiled = small_model(), small_model()
    graphs = CompileCounter()
    for layer in (compiled.model.layers[0], compiled.model.layers[-1]):  # dense, and with experts
        layer.forward = torch.compile(layer.forward, backend=graphs)
    counts = []
    for lengths in [(40, 7), (1, 90, 3), (64,), (30, 30, 30, 5)]:
        tokens, documents = packed(lengths)
        outs = [model(tokens, whole(documents)).logits_TV for model in (plain, compiled)]
        for out in outs:
            out.square().sum().backward()
        assert torch.equal(*outs)
        expected, got = gradients(plain), gradients(compiled)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        counts.append(graphs.frame_count)
    assert counts[1:] == counts[1:2] * 3  # numbers of rows are no longer compiled in
