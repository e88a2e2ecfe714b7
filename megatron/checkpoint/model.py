"""A checkpoint as a complete model in one process, for text generation, export and tests.

It needs no engine and no process group.
"""

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
    """Return the model of a checkpoint in fp32 and evaluation mode.

    Args:
        checkpoint: A checkpoint of any parallel layout.
        device: Where the model goes. Default: the CPU.

    Raises:
        CheckpointError: If the checkpoint is damaged or not complete, or a weight is not finite.
    """
    device = device or torch.device("cpu")
    config = checkpoint.read_config()
    # The vocabulary size depends on the tokenizer, which is not needed here. Padding is not stored,
    # so the first dimension of the embedding is the vocabulary size.
    vocab_size = checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0]
    # On the meta device, no memory is allocated and no weight is initialised. The weights of the
    # checkpoint replace them all.
    with torch.device("meta"):
        model = GPT(
            ModelShape(config.model, vocab_size, vocab_size),
            TensorParallel(),
            RandomStreams(0, device),
        )
    # `to_empty` makes new parameters, which do not have the attribute `spec`. So it is read first.
    specs = {
        name: parameter.spec  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }
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
