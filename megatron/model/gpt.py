"""GPT and Llama shapes as modules that can be cut: a stage holds some of the blocks, and embedding and head where it is at an end.

Parameter names are global: a block is called by its number in the whole model. tokens and labels are [b, s], activations [s, b, h].
"""

import torch
from torch import Tensor, nn

from megatron.model.block import Block
from megatron.model.embedding import Embedding
from megatron.model.execution import Execution
from megatron.model.inputs import Inputs
from megatron.model.loss import VocabSlice, cross_entropy
from megatron.model.norm import build_norm
from megatron.model.partition import Stage, make_single_stage
from megatron.model.positions import PositionTables
from megatron.model.shape import ModelShape
from megatron.parallel.collectives import enter_tensor_parallel
from megatron.parallel.layers import ParameterSpec, make_parameter, split_evenly
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import RandomStreams

WORD_EMBEDDING = "embedding.word.weight"


class Head(nn.Module):
    """Final norm, and the output matrix unless it is tied to a word embedding on the same stage."""

    def __init__(self, shape: ModelShape, tp: TensorParallel, stage: Stage) -> None:
        super().__init__()
        config = shape.config
        self.norm = build_norm(config, tp)
        self.weight: nn.Parameter | None = None
        tied = not config.untie_embeddings_and_output_weights
        if not (tied and stage.first):
            rows = split_evenly(shape.padded_vocab_size, tp)
            copy_of = WORD_EMBEDDING if tied else None
            spec = ParameterSpec(
                (shape.vocab_size, config.hidden_size), shard_dim=0, copy_of=copy_of
            )
            self.weight = make_parameter((rows, config.hidden_size), spec)


class GPT(nn.Module):
    """One stage of the model; by default all of it. A stage without a part has None in its place."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        streams: RandomStreams,
        stage: Stage | None = None,
        execution: Execution | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.tp = shape, tp
        self.stage = stage = stage or make_single_stage(shape)
        execution = execution or Execution()
        self._dtype = execution.dtype
        self.embedding = (
            Embedding(shape, tp, streams, fp32_residual=execution.fp32_residual)
            if stage.first
            else None
        )
        self.blocks = nn.ModuleDict(
            {str(i): Block(shape, i, tp, streams, execution) for i in stage.layers}
        )
        self.head = Head(shape, tp, stage) if stage.last else None
        self._positions = PositionTables(shape, tp)
        rows = split_evenly(shape.padded_vocab_size, tp)
        first = tp.rank * rows
        self._vocab = VocabSlice(first, min(max(shape.vocab_size - first, 0), rows))

    def forward(self, x: Tensor | None, inputs: Inputs) -> Tensor:
        """The residual stream behind this stage, [s, b, h] ([s/t, b, h] with sequence parallelism); from the last stage the
        microbatch's mean loss, a scalar in fp32. `x`: the stream before it; None for the first stage."""
        x = self._run_blocks(x, inputs)
        if self.head is None:
            return x
        assert inputs.labels is not None, "the loss needs labels"
        mask = None if inputs.loss_mask is None else inputs.loss_mask.t()
        hidden = enter_tensor_parallel(self.head.norm(x), self.tp)
        return cross_entropy(
            hidden, self._get_output_weight(), inputs.labels.t(), self._vocab, self.tp, mask
        )

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """[b, s] -> logits of this rank's real ids in fp32, [b, s, v/t] without padding. For the whole model in one stage."""
        assert self.head is not None, "only the last stage has logits"
        hidden = enter_tensor_parallel(
            self.head.norm(self._run_blocks(None, Inputs(tokens))), self.tp
        )
        return (
            torch.nn.functional.linear(hidden, self._get_output_weight()[: self._vocab.real])
            .float()
            .transpose(0, 1)
        )

    def _run_blocks(self, x: Tensor | None, inputs: Inputs) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(inputs)
        assert x is not None, "a stage behind the first needs the stream before it"
        positions = self._positions.make_positions(inputs, self._dtype or x.dtype)
        for block in self.blocks.values():
            x = block(x, positions, inputs.dropout_key)
        return x

    def _get_output_weight(self) -> Tensor:
        assert self.head is not None, "only the last stage has an output matrix"
        if self.head.weight is not None:
            return self.head.weight
        assert self.embedding is not None, "tied on one stage"
        return self.embedding.word.weight
