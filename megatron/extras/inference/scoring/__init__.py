"""Likelihoods of texts under a checkpoint's model, and the tasks of lm-evaluation-harness.

`eval_tasks` evaluates tasks while a run trains, `tasks` and `harness` evaluate those of a
checkpoint. Both compute with `likelihood`.

Invariant: a likelihood does not depend on the batch.
"""
