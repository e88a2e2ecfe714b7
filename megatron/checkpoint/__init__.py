"""Checkpoints that any parallel layout can load.

A checkpoint has slices of global tensors in safetensors files, an index and a manifest. Nothing in
it can run code. See docs/checkpoint_format.md for the files. See `save.py` and `start.py` for the
handling of errors.
"""
