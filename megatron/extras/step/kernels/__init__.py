"""Triton kernels, each of which computes several operators of the model at once.

`operators.py` chooses them, and `kind.py` gives them to an engine. Only the modules whose names end
with `_kernel` import Triton. See `docs/kernels.md`.
"""
