"""What `models.torch_private` has of flash attention, in any dtype, a sequence at a time.

What a kernel does not write is not a number here.
"""

import torch


def sequences(q, k, bounds_q, bounds_k, causal):
    """Rows of queries and of keys, the heads of the keys, and who sees whom."""
    assert int(bounds_k[-1]) == len(k)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    bounds = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    for begin, end, first, last in bounds:
        sees = torch.ones(int(end - begin), int(last - first), dtype=torch.bool)
        yield slice(begin, end), slice(first, last), heads, sees.tril() if causal else sees


def scores_of(q, k, rows, keys, heads, sees, scale):
    scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys][:, heads]) * scale
    return scores.masked_fill(~sees, float("-inf"))


def flash_forward(q, k, v, bounds_q, bounds_k, longest_q, longest_k, causal, scale):
    out, sums = torch.full_like(q, float("nan")), q.new_full(q.shape[1::-1], float("nan"))
    assert (bounds_q.diff() <= longest_q).all()
    assert (bounds_k.diff() <= longest_k).all()
    for rows, keys, heads, sees in sequences(q, k, bounds_q, bounds_k, causal):
        scores = scores_of(q, k, rows, keys, heads, sees, scale)
        sums[:, rows] = scores.logsumexp(2)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(2), v[keys][:, heads])
    return out, sums


def flash_backward(
    grad, q, k, v, out, sums, bounds_q, bounds_k, longest_q, longest_k, causal, scale
):
    dq, dk, dv = torch.full_like(q, float("nan")), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, heads, sees in sequences(q, k, bounds_q, bounds_k, causal):
        scores = scores_of(q, k, rows, keys, heads, sees, scale)
        weights = (scores - sums[:, rows, None]).exp()
        dv[keys] = dv[keys].index_add(1, heads, torch.einsum("hqk,qhd->khd", weights, grad[rows]))
        dweights = torch.einsum("qhd,khd->hqk", grad[rows], v[keys][:, heads])
        delta = (grad[rows] * out[rows]).sum(2).T[:, :, None]
        dscores = weights * (dweights - delta) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, k[keys][:, heads])
        dk[keys] = dk[keys].index_add(1, heads, torch.einsum("hqk,qhd->khd", dscores, q[rows]))
    return dq, dk, dv
