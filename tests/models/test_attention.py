import itertools
from typing import NamedTuple

import pytest
import torch

from models.attention import document_mask, documents_attention, packed_attention
from models.causal_lm import (
    next_token_loss,
)


def test_mask_is_causal_inside_each_document():
    mask = document_mask(torch.tensor([0, 2, 4, 8], dtype=torch.int32), 2, 4)
    assert mask.shape == (2, 1, 4, 4)
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].int().tolist() == first
    assert mask[1, 0].int().tolist() == torch.ones(4, 4).tril().int().tolist()


def test_packed_attention_equals_each_document_alone():
    torch.manual_seed(0)
    H, K, D, boundaries = 4, 2, 8, [0, 3, 8, 12, 16]
    q = torch.randn(2, H, 8, D, dtype=torch.float64)
    k, v = torch.randn(2, 2, K, 8, D, dtype=torch.float64)
    cu = torch.tensor(boundaries, dtype=torch.int32)
    out, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, scaling=0.3, cu_seq_lens_q=cu, max_length_q=5
    )
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for begin, end in itertools.pairwise(boundaries):
        q1, k1, v1 = (x[begin:end].transpose(0, 1) for x in flat)
        k1, v1 = (x.repeat_interleave(H // K, dim=0) for x in (k1, v1))
        scores = (q1 @ k1.mT * 0.3).masked_fill(
            ~torch.ones(end - begin, end - begin, dtype=torch.bool).tril(), -torch.inf
        )
        expected = (scores.softmax(-1) @ v1).transpose(0, 1)
        torch.testing.assert_close(out.flatten(0, 1)[begin:end], expected)


def test_variants_that_do_not_exist_name_the_key_to_set():
    x = torch.zeros(1, 1, 2, 4)
    cu = torch.tensor([0, 2])
    for extra in ({"softcap": 50.0}, {"sliding_window": 8}, {"s_aux": x}):
        with pytest.raises(ValueError, match="model.attention=(sdpa|eager)"):
            packed_attention(
                torch.nn.Module(), x, x, x, None, cu_seq_lens_q=cu, max_length_q=2, **extra
            )


class Rows(NamedTuple):
    cu_seq_lens: torch.Tensor
    lengths: list[int]

    @staticmethod
    def of(lengths, device="cpu"):
        boundaries = [0, *itertools.accumulate(lengths)]
        return Rows(torch.tensor(boundaries, dtype=torch.int32, device=device), lengths)


def looked_up(q_THD, k_UKD, v_UKD, queries, keys, window):
    """Query by query, in fp64."""
    outs, begin = [], 0
    for document, rows in enumerate(queries.lengths):
        more = keys.lengths[document] - rows  # keys before the first query
        first = sum(keys.lengths[:document])
        for row in range(rows):
            low = max(0, more + row - window + 1) if window else 0
            seen = slice(first + low, first + more + row + 1)
            group = q_THD.shape[1] // k_UKD.shape[1]
            k, v = (x[seen].double().repeat_interleave(group, dim=1) for x in (k_UKD, v_UKD))
            weights = (torch.einsum("hd,uhd->hu", q_THD[begin].double(), k) * 0.3).softmax(-1)
            outs.append(torch.einsum("hu,uhd->hd", weights, v))
            begin += 1
    return torch.stack(outs)


def check_documents(device, dtype, tolerance):
    torch.manual_seed(0)
    for lengths, more in (([5, 1, 9], 0), ([4, 3], 2), ([6], 11)):
        queries, keys = (Rows.of([lengths[0] + extra, *lengths[1:]], device) for extra in (0, more))
        q = torch.randn(sum(queries.lengths), 4, 32, device=device, dtype=dtype)
        k, v = torch.randn(2, sum(keys.lengths), 2, 32, device=device, dtype=dtype)
        for window in (None, 1, 3, 50):
            got = documents_attention(q, k, v, queries, keys, scaling=0.3, window=window)
            expected = looked_up(q, k, v, queries, keys, window)
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


def test_documents_with_more_keys_than_queries_and_windows():
    check_documents("cpu", torch.float64, 1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_flash_kernel_sees_what_the_reference_sees():
    check_documents("cuda", torch.bfloat16, 2e-2)
    check_documents("cuda", torch.float32, 1e-5)


def test_loss_ignores_labels_and_survives_having_none():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[1, -100, 4], [0, 2, -100]])
    expected = -torch.stack(
        [logits.log_softmax(-1)[b, s, labels[b, s]] for b in range(2) for s in range(3)
         if labels[b, s] >= 0]
    ).sum()  # fmt: skip
    torch.testing.assert_close(next_token_loss(logits, labels), expected)
    nothing = next_token_loss(logits, torch.full((2, 3), -100))
    nothing.backward()
    assert nothing == 0
    assert (logits.grad == 0).all()
