"""Whether ranks can share the sequences of a model: said before any of them starts."""

from typing import Any


def check_shareable(hf_config: Any, attention: str, packed: bool) -> None:
    """Raise `ValueError` unless ranks can share the sequences of this architecture.

    `attention` is `model.attention`, `packed` whether `packed` can run, windows aside.
    """
    layers = set(getattr(hf_config.get_text_config(), "layer_types", None) or ())
    others = layers - {"full_attention", "sliding_attention"}
    reason = None
    if others:
        reason = f"it has layers of {', '.join(sorted(others))}"
    elif not packed:
        reason = "its attention is not one that model.attention=packed can run"
    elif attention not in ("auto", "packed"):
        reason = f"model.attention={attention} sees one rank's tokens only"
    if reason is not None:
        raise ValueError(
            f"model.type={hf_config.model_type} cannot share sequences between ranks, since {reason}: "
            "set parallel.sequence.size=1"
        )


def check_heads(hf_config: Any, ranks: int) -> None:
    """Raise `ValueError` if so many ranks cannot have a query head each."""
    heads = hf_config.get_text_config().num_attention_heads
    if ranks > heads:
        raise ValueError(
            f"parallel.sequence.size={ranks} is more than the {heads} query heads that ranks would "
            f"share: set parallel.sequence.size={heads} or less"
        )
