"""Builders of small models for tests."""

import torch

from megatron.config.model import ModelConfig
from megatron.model.gpt import GPT
from megatron.model.init import initialise
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

VOCAB = 101


def tiny_config(**changes: object) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return ModelConfig(**(sizes | off | changes))  # type: ignore[arg-type]


def build(config: ModelConfig, *, padded: int = 128, seed: int = 7) -> GPT:
    """Build a model on one process, initialised as an engine does it."""
    shape = ModelShape(config, VOCAB, padded)
    with torch.device("meta"):
        model = GPT(shape, TensorParallel())
    specs = {name: parameter.spec for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        rows = specs[name].shape[0]
        offset = (0,) * parameter.dim()
        kind = specs[name].init
        initialise(name, kind, parameter.data[:rows], specs[name].shape, offset, shape, seed)
    return model


def some_tokens(batch: int = 3, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
