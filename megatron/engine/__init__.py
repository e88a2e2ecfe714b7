"""Execution of one training step.

`base.py` defines the interface of an engine. The training loop uses only this interface.
"""
