"""The rank grid, process groups and tensor parallelism.

This package does not use a library for tensor parallelism, because the implementation is the main
purpose of the project.

`grid` and `mesh` have the coordinates and groups of the ranks. `collectives` and `layers` are
tensor parallelism, and `rng` draws masks of dropout. `shard` has the interface between engines and
checkpoints. `rendezvous`, `ranks` and `messages` let the ranks meet and agree. `roll_call`
names ranks that do not answer.
"""
