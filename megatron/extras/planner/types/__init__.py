"""Types of tensors over groups of ranks: `tools/verify.py --types`.

`check.py` runs one training step of some ranks of the real layout on fake GPUs (`typed_rank.py`).
`forward.py` types the forward passes with the package spmd_types. `messages.py` records what is
sent, and follows the gradients from the backward pass to the update.
"""
