"""LeLoRA: adapters whose trainable components a learned policy chooses, matrix by matrix.

Inspired by the abstract of "LeLoRA" (ACL 2026, long 1628): a policy network reads each weight matrix's
singular values and norms and says which of its components train, and reinforcement learning updates
model and policy in turn. What the abstract leaves open is our own design: `docs/lelora.md`.

    spectrum   singular values and directions of a weight matrix, exact, with fixed signs
    windows    which components there are to choose from
    adapter    the padded low-rank update beside a linear layer, in five parametrisations
    inject     adapters beside any linear layers of a model
    fold       what is no longer trained, as one frozen low-rank product
    switch     other rows train from now on, and the function stays as it is
    row_steps  rows that have just arrived have a count of optimizer steps of their own
    budget     widths that never cost more than they may
    actions    what the policy may do to a matrix, and with which probability
    features   what the policy sees of a matrix
    policy     the network, and where it starts
    learner    REINFORCE, PPO and branching GRPO, with a state of fixed size
    population  many runs side by side as one batched model
    peft_folder  what was learnt, as an ordinary LoRA folder
    verify     whether such a folder does anything once it is loaded
"""
