"""Execution of one training step.

`base` has the interface of an engine, and `kind` what a start must know about one. The training
loop uses only these. `native` is the engine on PyTorch, and `engine_base` has what all engines
share. `parallelize` shows what is applied to the model, and in which order. `runner` and
`pipeline_runner` order the microbatches, and `sharding` is ZeRO on FSDP2.

Invariant: an engine holds no counter of the run.
"""
