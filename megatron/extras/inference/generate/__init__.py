"""Text generation from a checkpoint's model.

`load` loads a checkpoint on one or several processes, and `generation` continues a batch of
prompts. `staged_model` is a model whose stages are on several ranks.

Invariant: the text of a prompt does not depend on its batch, and not on the stages.
"""
