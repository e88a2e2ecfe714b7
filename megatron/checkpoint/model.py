"""A checkpoint as a whole model in one process: for generating text, export and tests; no engine, no process group."""

import torch

from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.ranks import Ranks
from megatron.model.gpt import GPT
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import RandomStreams
from megatron.parallel.shard import TensorShard


def load_model(checkpoint: Checkpoint, device: torch.device | None = None) -> GPT:
    """The model in fp32 and evaluation mode, on the CPU by default.

    Raises:
        CheckpointError: the checkpoint is damaged or not whole; or a weight is not finite.
    """
    device = device or torch.device("cpu")
    config = checkpoint.read_config()
    vocab_size = checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0]
    with torch.device("meta"):
        model = GPT(
            ModelShape(config.model, vocab_size, vocab_size),
            TensorParallel(),
            RandomStreams(0, device),
        )
    specs = {name: parameter.spec for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    model.to_empty(device=device)
    shards = [
        TensorShard(
            "weight", name, specs[name].shape, (0,) * parameter.dim(), parameter.data, owner=True
        )
        for name, parameter in model.named_parameters()
    ]
    checkpoint.load_into(shards)
    refuse_not_finite(checkpoint, describe_not_finite(shards), Ranks())
    return model.eval()
