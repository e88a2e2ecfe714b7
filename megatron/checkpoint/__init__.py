"""Checkpoints that know no layout: boxes of global tensors in safetensors files, an index, a manifest. Nothing in them runs code.

SAVE/latest                              global_step300
SAVE/latest_checkpointed_iteration.txt   300
SAVE/global_step300/manifest.json        format, iteration, TrainState, optimizer scalars, files and their sizes
                    index.json           kind/name -> global shape and its boxes: file, offset, shape
                    config.yaml          the resolved configuration
                    rank_00000.safetensors ...
"""
