"""Language models whose tokens ranks share: losses and gradients of one process, in fp64."""

import pytest
import torch
import torch.distributed as dist

from models.causal_lm import CausalLMConfig
from parallel.repacking.heads import HeadMap
from parallel.sequence import SequenceRanks, spread
from recipes.pretrain import PretrainConfig, PretrainTask
from recipes.text.config import TextConfig
from recipes.text.packing import Sequence_S
from tests.ranks import run_ranks
from tests.recorder import Recorder

WINDOW = {"config": {"sliding_window": 7}}
MIXED = {
    "type": "qwen3",
    "config": {
        "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
"""Norms of transformers' Gemma add up their gradients in fp32, whatever the type of the weights."""
CASES = [
    # heads, key/value heads, what else; lengths of the documents of each sequence; way of windows;
    # all-to-alls of two layers' forward pass
    ((6, 2, {}), [[16], [3, 13]], "exchange", 4),
    ((5, 1, {"type": "qwen3"}), [[1, 1, 14], [7, 9]], "exchange", 4),
    ((4, 4, {"tie_embeddings": True}), [[5, 6, 5]], "exchange", 4),
    ((8, 2, {"type": "mistral", **WINDOW}), [[16], [10, 6]], "exchange", 4),
    ((4, 2, {"type": "mistral", **WINDOW}), [[20, 2], [10, 12]], "halo", 2),
    ((4, 1, MIXED), [[20, 2], [10, 12]], "halo", 3),
    ((6, 3, {}), [[2, 1]], "exchange", 4),  # fewer tokens than four ranks
]


def task(heads, kv_heads, extra):
    config = CausalLMConfig(
        num_layers=2, hidden_size=4 * heads, intermediate_size=24, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=8, **extra,
    )  # fmt: skip
    return PretrainTask(task=PretrainConfig(), model=config, data=TextConfig(), seed=0)


def built(of):
    model = of.build_model().to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        of.init_weights(module)
    model.tie_weights()
    return model.double()


def sequences(lengths):
    """One of random tokens for each list; labels shifted, none at the end of a document."""
    generator, made = torch.Generator().manual_seed(7), []
    for documents in lengths:
        tokens = torch.randint(256, (sum(documents),), generator=generator).numpy()
        labels, positions, starts, at = tokens.copy(), tokens.copy(), [], 0
        for n in documents:
            labels[at : at + n] = [*tokens[at + 1 : at + n], -100]
            positions[at : at + n] = range(n)
            starts.append(at)
            at += n
        made.append(Sequence_S(tokens, labels, positions, starts, 0))
    return made


def check_gradients(cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    for how, lengths, windows, calls in cases:
        samples = sequences(lengths)
        alone, ours = task(*how), task(*how)
        reference = built(alone)
        whole = alone.collate(samples)
        expected = alone.loss(reference, whole)
        expected.backward()

        ours.share_sequences(SequenceRanks(world, rank, dist.group.WORLD, windows))
        model = built(ours)
        batch = ours.collate(samples)
        with Recorder() as log:
            loss = ours.loss(model, batch)
            forward = len(log.calls)
            loss.backward()
        assert {call.name for call in log.calls} == {"alltoall_base_"}
        assert (forward, len(log.calls)) == (calls, 2 * calls)

        sums = torch.stack([loss.detach(), torch.tensor(float(ours.count(batch)))]).double()
        sums = torch.cat([sums, torch.tensor([ours.flops(batch)], dtype=torch.float64)])
        dist.all_reduce(sums)
        torch.testing.assert_close(sums[0], expected.detach().double(), rtol=1e-6, atol=0)
        assert sums[1] == alone.count(whole)
        if whole["tokens_BS"].numel() >= world:
            assert sums[2].item() == pytest.approx(alone.flops(whole))
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert got.grad is not None, name
            dist.all_reduce(got.grad)
            torch.testing.assert_close(
                got.grad,
                want.grad,
                rtol=0,
                atol=1e-10,
                msg=lambda m, where=(name, how): f"{where}: {m}",
            )


@pytest.mark.parametrize(("world", "cases"), [(3, CASES[:2]), (4, CASES)])
def test_gradients_are_those_of_one_process(world, cases):
    run_ranks(world, check_gradients, cases)


def test_keys_and_values_are_spread_only_where_heads_do_not_divide():
    k = torch.arange(2.0).view(1, 2, 1).requires_grad_()
    assert spread(HeadMap(8, 2, 2), 0, k)[0] is k
    (wide,) = spread(HeadMap(8, 2, 3), 1, k)  # query heads 2, 3 and 4
    assert wide.flatten().tolist() == [0, 0, 1]
    (wide * torch.tensor([1.0, 2, 4]).view(1, 3, 1)).sum().backward()
    assert k.grad.flatten().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("heads", "extra", "words"),
    [
        (4, {"type": "gemma2"}, "model.type=gemma2 cannot share sequences between ranks"),
        (4, {"attention": "sdpa"}, "model.attention=sdpa sees one rank's tokens only"),
        (
            4,
            {"type": "llama4_text"},
            r"layers of chunked_attention: set parallel.sequence.size=1",
        ),
    ],
)
def test_models_that_cannot_share_say_so(heads, extra, words):
    refused = task(heads, 2, extra)
    refused.share_sequences(SequenceRanks(2))
    with pytest.raises(ValueError, match=words):
        refused.build_model()


def test_more_ranks_than_heads_are_refused():
    refused = task(4, 2, {})
    refused.share_sequences(SequenceRanks(8))
    with pytest.raises(ValueError, match="=8 is more than the 4 query heads .*size=4 or less"):
        refused.check()
