"""LeLoRA in training: what the tasks `lelora_sft` and `lelora_classify` share.

config       the node `lelora`
spectra      the exact decomposition of every adapted matrix, once, over all ranks
shards       whole tensors of sharded adapters, and back
brain        policy and learner, the same on every rank
switching    adapters, and the setting that they have
meta         the samples that say what a decision was worth
credit       how much each matrix did for the loss
candidates   trying decisions from a copy of everything
population   a policy learns from whole short runs before this one begins
steering     the whole of it, between optimizer steps
journal      decisions.jsonl, and the report's panels
adapted      adapters in a task's model, first weights, export
baselines    peft's layers; activations: EVA's directions; adalora: its allocator
labelled     texts with labels
"""
