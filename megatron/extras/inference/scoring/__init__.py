"""Likelihoods of texts under a checkpoint's model, and the tasks of lm-evaluation-harness.

`eval_tasks` evaluates tasks while a run trains, with the likelihoods of `in_loop`. `tasks` and
`harness` evaluate those of a checkpoint, with the likelihoods of `likelihood`.

Invariant: a likelihood does not depend on the batch.
"""
