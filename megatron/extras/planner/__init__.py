"""Predicted memory and time of a run, the search of layouts, and dry runs.

`prediction` predicts the step of a plan by the model in `cost`. `dry_run` executes a step on fake
tensors.
"""
