"""A corpus of many shards: made on one machine, on Slurm or on Ray, and read as one data set.

A shard is an indexed data set with the documents of one input file. The manifest, such as
corpus.json, lists the shards.

`prepare` makes the shards with the tasks that `engines` starts. A task writes `shards`.
`manifest` is the file, and `joined` presents its shards as one data set to training.

Invariant: the bytes of a shard are a function of its input file, the key and the tokenizer. They do
not depend on the engine, the number of tasks, their order, retries or lost workers. The manifest
is written when all tasks have ended.
"""
