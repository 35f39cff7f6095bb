"""LeLoRA in training: what the tasks `lelora_sft` and `lelora_classify` share.

config      the node `lelora`
spectra     the exact decomposition of every adapted matrix, once, over all ranks
shards      whole tensors of sharded adapters, and back
meta        the samples that say what a decision was worth
credit      how much each matrix did for the loss
brain       policy and learner, the same on every rank
steering    the whole of it, between optimizer steps
adapted     adapters in a task's model, first weights, export
"""
