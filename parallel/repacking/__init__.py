"""Layerwise repacking: which ranks share which samples, in which layers; plans without any model.

planner = Planner(CostModel(shape, load("h200")), num_ranks=64)
plan = planner.plan(lengths)
layout = plan.layout(plan.parent_of(rank))      # which rows this rank holds
exchange_sizes(layout, HeadMap(64, 8, layout.width), rank_in_parent)   # sizes of the all-to-alls
"""
