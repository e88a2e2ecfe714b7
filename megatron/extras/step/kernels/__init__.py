"""Triton kernels, each of which computes several operators of the model at once.

`kind.py` chooses them and gives them to an engine. Only the modules whose names end
with `_kernel` import Triton. See `docs/kernels.md`.
"""
