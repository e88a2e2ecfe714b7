"""The engine that trains with DeepSpeed.

`kind` is what a start knows about it, and lists what it cannot run. `deepspeed` is the engine, and
the only file that imports DeepSpeed. `deepspeed_adapters` builds its configuration. `partitions`
has its partitions as shards of global tensors, and the moments of AdamW.
"""
