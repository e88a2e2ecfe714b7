"""Likelihoods of texts under a checkpoint's model, and the tasks of lm-evaluation-harness."""
