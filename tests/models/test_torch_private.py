"""Fails when torch changes what `models.torch_private` calls."""

import torch

FORWARD = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
           "is_causal", "return_debug_mask"]  # fmt: skip
BACKWARD = ["grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q",
            "max_k", "dropout_p", "is_causal", "rng_state", "unused"]  # fmt: skip


def test_flash_attention_takes_what_it_took():
    """On a GPU `tests/models/hybrid/test_gpu.py` sees what it does with it."""
    for name, expected in (("forward", FORWARD), ("backward", BACKWARD)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        positional = [a.name for a in schema.arguments if not a.kwarg_only]
        assert positional == expected
        assert "scale" in {a.name for a in schema.arguments if a.kwarg_only}
