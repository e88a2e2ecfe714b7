"""3D-parallel pretraining of GPT and Llama models. `docs/architecture.md` is the map; `pretrain_gpt.py` is the way in."""

__version__ = "0.1.0"
