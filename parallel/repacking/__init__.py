"""Layerwise repacking: which ranks share which samples, in which layers, and the exchange between them.

planner = Planner(CostModel(shape, load("h200")), num_ranks=64)
plan = planner.plan(lengths)
layout = plan.layout(plan.parent_of(rank))      # which rows this rank holds
shards = Shards(layout, rank_in_parent, groups[parent.first_rank, parent.width])
to_heads(q, k, v, shards), to_rows(out, 64, shards)   # the two all-to-alls of a full layer
"""
