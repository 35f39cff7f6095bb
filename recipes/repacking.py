"""A hybrid model whose rows lie over ranks by plan: what it costs to plan for, and how it attends.

Rows live in the child's layout through all layers. Full layers attend over the parent, all others over
the child, each by one exchange to the ranks of the heads and one back; where a parent is not repacked,
the two groups are the same.

Legend: t rows of this rank, T rows of a group, H query heads, K key/value heads, h and k those of this
rank, D head dim.
"""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from models.hybrid.attention import Rule, attend
from models.hybrid.documents import Documents
from models.hybrid.model import Rows
from models.hybrid.shape import FULL, SLIDING_WINDOW, Shape
from parallel.repacking.exchange import Shards, head_map, to_heads, to_rows
from parallel.repacking.ranks import PlannedRanks
from parallel.repacking.shape import ModelShape
from parallel.sequence import spread
from recipes.task import Batch


def model_shape(shape: Shape, ranks: PlannedRanks) -> ModelShape:
    """What of the model costs time; layers that are not full count as their commonest kind."""
    sparse = Counter(kind for kind in shape.kinds if kind != FULL).most_common(1)
    return ModelShape(
        hidden=shape.hidden_size,
        head_dim=shape.head_dim,
        q_heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        full_layers=shape.kinds.count(FULL),
        sparse_layers=shape.num_layers - shape.kinds.count(FULL),
        sparse="window" if sparse and sparse[0][0] == SLIDING_WINDOW else "topk",
        window=shape.window,
        block=shape.block,
        top_k=shape.top_k,
        dense_layers=shape.num_layers - shape.moe_layers,
        dense_hidden=shape.intermediate_size,
        expert_hidden=shape.expert_size,
        experts_per_token=shape.active_experts + shape.shared_experts,
        vocab=shape.vocab_size,
        gated=True,
        recompute=ranks.recompute,
        dtype_bytes=ranks.dtype_bytes,
    )


def planned_rows(batch: Batch, ranks: PlannedRanks) -> Rows:
    """What the model is told about the rows of `recipes.text.planned.planned_batch`."""
    parent, child = ranks.shards(batch["plan"])
    wide = _documents(parent, batch["cu_seq_lens"])
    own = _documents(child, batch["child_cu_seq_lens"])

    @torch.compiler.disable
    def attend_over(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, rule: Rule) -> Tensor:
        if rule.kind == FULL:
            return _exchanged(q_tHD, k_tKD, v_tKD, rule, parent, wide)
        return _exchanged(q_tHD, k_tKD, v_tKD, rule, child, own)

    return Rows(batch["positions_T"], attend_over)


def _exchanged(
    q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, rule: Rule, shards: Shards, documents: Documents
) -> Tensor:
    """Attention of this rank's rows, (t, H, D); every rank of the group calls it for every layer."""
    H, K = q_tHD.shape[1], k_tKD.shape[1]
    q_ThD, k_TkD, v_TkD = to_heads(q_tHD, k_tKD, v_tKD, shards)
    if q_ThD.numel():
        heads = head_map(H, K, shards.layout.width)
        k_TkD, v_TkD = spread(heads, shards.rank, k_TkD, v_TkD)
    return to_rows(attend(q_ThD, k_TkD, v_TkD, documents, rule), H, shards)


def _documents(shards: Shards, cu_seq_lens: Tensor) -> Documents:
    return Documents(tuple(np.diff(shards.layout.offsets).tolist()), cu_seq_lens)
