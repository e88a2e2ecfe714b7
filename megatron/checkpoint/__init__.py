"""Checkpoints that know no layout: boxes of global tensors in safetensors files, an index, a manifest. Nothing in them runs code.

See docs/checkpoint_format.md for the files, and `save.py` and `start.py` for what may go wrong with them.
"""
