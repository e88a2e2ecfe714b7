"""A checkpoint as a model in evaluation mode, for text generation, export and tests.

It needs no engine, and in one process no process group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.load import Checkpoint
from megatron.model.gpt import GPT
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.parallel.layers import ParameterSpec
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.ranks import Ranks
from megatron.parallel.rng import RandomStreams
from megatron.parallel.shard import TensorShard
from megatron.tokenizer import compute_padded_vocab_size


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | None = None,
    tp: TensorParallel | None = None,
    ranks: Ranks | None = None,
    stage: Stage | None = None,
) -> GPT:
    """Return the model of a checkpoint, or a stage of it, in fp32 and evaluation mode.

    Args:
        checkpoint: A checkpoint of any parallel layout.
        device: Where the model goes. Default: the CPU.
        tp: The tensor-parallel ranks, each of which gets its part. Default: one process alone.
        ranks: All ranks that load the checkpoint, for the error that they raise together. Default:
            one process alone.
        stage: The stage to load. Default: the complete model.

    Raises:
        CheckpointError: If the checkpoint is damaged or not complete, or a weight is not finite.
    """
    device = device or torch.device("cpu")
    tp = tp or TensorParallel()
    # On the meta device, no memory is allocated and no weight is initialised. The weights of the
    # checkpoint replace them all.
    with torch.device("meta"):
        model = GPT(read_shape(checkpoint, tp.size), tp, RandomStreams(0, device), stage)
    # `to_empty` makes new parameters, which do not have the attribute `spec`. So it is read first.
    specs = {
        name: parameter.spec  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }
    model.to_empty(device=device)
    shards = [
        shard
        for name, parameter in model.named_parameters()
        for shard in _locate_shards(name, specs[name], parameter.data, tp)
    ]
    checkpoint.load_into(shards)
    refuse_not_finite(checkpoint, describe_not_finite(shards), ranks or Ranks())
    return model.eval()


def read_shape(checkpoint: Checkpoint, tensor: int = 1) -> ModelShape:
    """Return the sizes of a checkpoint's model on a number of tensor-parallel ranks.

    Raises:
        CheckpointError: If the checkpoint is damaged, or of a version with other fields.
    """
    # The vocabulary size depends on the tokenizer, which is not needed here. Padding is not stored,
    # so the first dimension of the embedding is the vocabulary size.
    vocab_size = checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0]
    padded = compute_padded_vocab_size(vocab_size, 1, tensor)
    return ModelShape(checkpoint.read_config().model, vocab_size, padded)


def _locate_shards(
    name: str, spec: ParameterSpec, tensor: Tensor, tp: TensorParallel
) -> Iterator[TensorShard]:
    """Yield the slices of the complete model that a local tensor holds, without padding."""
    offset = spec.compute_offset(tensor.shape, tp.rank)
    for piece in spec.locate_rows(offset[0], tensor.shape[0]):
        rows = tensor[piece.local : piece.local + piece.rows]
        place = (piece.start, *offset[1:])
        yield TensorShard("weight", spec.get_global_name(name), spec.shape, place, rows, owner=True)
