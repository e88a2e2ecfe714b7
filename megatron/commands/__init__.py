"""Console commands. `pyproject.toml` lists them, and the files under `tools/` call them.

`pretrain` is the training. `parts` connects it with the extras.
"""
