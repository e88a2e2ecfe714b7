"""Checkpoints that any parallel layout can load.

A checkpoint has slices of global tensors in safetensors files, an index and a manifest. Nothing in
it can run code. docs/checkpoint_format.md describes the files.

`save` decides when to save and starts the stages of a save, which `stages` has in their order. The
last one gives the checkpoint its name. `shard_file` writes the file of a rank. `start` finds the
checkpoint that a run starts from, and `load` reads it. `manifest` compares the digests of small
files, and `tensor_file` those of each block of tensors. `lineage` knows what a run may remove.
`lease` gives a folder one writer.

Invariant: a kill at any instant leaves a complete checkpoint, and nothing is loaded unchecked.
"""
