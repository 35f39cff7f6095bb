"""How often each label was given for each, and what follows from that.

B texts, L labels
"""

import torch
from torch import Tensor


def confusion(logits_BL: Tensor, labels_B: Tensor) -> Tensor:
    """Counts, (L, L): the right label, then the one that was given."""
    L = logits_BL.shape[1]
    pairs_B = labels_B * L + logits_BL.argmax(1)
    return torch.bincount(pairs_B, minlength=L * L).view(L, L)


def shares(confusion_LL: Tensor) -> dict[str, float]:
    """Accuracy, and the mean F1 of the labels that were there or given."""
    hits_L = confusion_LL.diagonal()
    both_L = confusion_LL.sum(0) + confusion_LL.sum(1)
    f1_L = 2 * hits_L / both_L.clamp(min=1)
    return {
        "accuracy": float(hits_L.sum()) / max(float(confusion_LL.sum()), 1.0),
        "macro_f1": float(f1_L[both_L > 0].mean()) if (both_L > 0).any() else 0.0,
    }
