"""3D-parallel pretraining of GPT and Llama models.

`docs/architecture.md` describes the modules. `megatron/commands/pretrain.py` is the entry point.
"""

__version__ = "0.1.0"
