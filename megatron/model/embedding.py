"""Embedding of token ids: word vectors, optional LayerNorm, learned positions and dropout."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.dropout import Dropout
from megatron.model.inputs import Inputs
from megatron.model.norm import Norm, build_norm
from megatron.model.shape import ModelShape
from megatron.parallel.context import take_own
from megatron.parallel.layers import VocabParallelEmbedding, make_replicated_outside_region
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.parameter_spec import Init, make_matrix_spec


class Embedding(nn.Module):
    """The first part of the model, from token ids to the residual stream."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        context: ContextParallel,
        *,
        fp32_residual: bool = False,
    ) -> None:
        """Create the word embedding and the optional parts.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
            context: The context-parallel ranks.
            fp32_residual: Keep the residual stream in fp32.
        """
        super().__init__()
        config = shape.config
        self.tp = tp
        self.context = context
        self.fp32_residual = fp32_residual
        self.word = VocabParallelEmbedding(
            shape.vocab_size, shape.padded_vocab_size, config.hidden_size, tp=tp, init=Init.TABLE
        )
        # BigScience's 104B model used this norm against loss spikes (its lessons learned). It is a
        # LayerNorm also if the blocks use RMSNorm.
        self.norm: Norm | None = None
        if config.embed_layernorm:
            self.norm = build_norm(replace(config, normalization="LayerNorm"), tp)
        rows = shape.position_table_size
        self.position: nn.Parameter | None = None
        if rows:
            spec = make_matrix_spec(rows, config.hidden_size, Init.TABLE)
            self.position = make_replicated_outside_region(spec, tp)
        self.dropout = Dropout(config.hidden_dropout, 0, config.hidden_size, tp, context)

    def forward(self, inputs: Inputs) -> Tensor:
        """Map ids [b, s] to [s, b, h], or to [s/t, b, h] with sequence parallelism.

        With context parallelism, read s/c for s.
        """
        x = self.word(inputs.tokens.t())
        if self.norm is not None:
            x = self.norm(x)
        if self.fp32_residual:
            x = x.float()
        if self.position is not None:
            local = x.shape[0]
            first = 0
            # With sequence parallelism each rank holds a slice of the sequence, so it adds the
            # positions of that slice only.
            if self.tp.sequence_parallel:
                first = self.tp.rank * local
            if inputs.position_ids is None:
                # Without context parallelism, the slice below is all that is needed.
                rows: Tensor = self.position
                if self.context.size > 1:
                    whole = inputs.tokens.shape[1] * self.context.size
                    rows = take_own(rows[:whole], self.context, 0)
                x = x + rows[first : first + local].unsqueeze(1)
            else:
                x = x + F.embedding(inputs.position_ids.t()[first : first + local], self.position)
        return self.dropout(x, inputs.dropout_key)
