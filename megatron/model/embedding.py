"""From token ids to the residual stream: word vectors, their norm if asked for, learned positions, dropout."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.dropout import Dropout
from megatron.model.inputs import Inputs
from megatron.model.norm import LayerNorm
from megatron.model.shape import ModelShape
from megatron.parallel.layers import VocabParallelEmbedding, make_replicated_parameter
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import RandomStreams


class Embedding(nn.Module):
    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        streams: RandomStreams,
        *,
        fp32_residual: bool = False,
    ) -> None:
        super().__init__()
        config = shape.config
        self.tp = tp
        self.fp32_residual = fp32_residual
        self.word = VocabParallelEmbedding(
            shape.vocab_size, shape.padded_vocab_size, config.hidden_size, tp=tp
        )
        # The 104B's cure for spikes (BigScience, lessons learned): a LayerNorm, also where the blocks use RMSNorm.
        self.norm = (
            LayerNorm(config.hidden_size, config.layernorm_epsilon, tp)
            if config.embed_layernorm
            else None
        )
        rows = shape.position_table_size
        self.position = make_replicated_parameter((rows, config.hidden_size), tp) if rows else None
        self.dropout = Dropout(config.hidden_dropout, 0, streams, sharded=tp.sequence_parallel)

    def forward(self, inputs: Inputs) -> Tensor:
        """Ids [b, s] -> [s, b, h] (or [s/t, b, h] with sequence parallelism)."""
        x = self.word(inputs.tokens.t())
        if self.norm is not None:
            x = self.norm(x)
        if self.fp32_residual:
            x = x.float()
        if self.position is not None:
            local = x.shape[0]
            first = self.tp.rank * local if self.tp.sequence_parallel else 0
            if inputs.position_ids is None:
                x = x + self.position[first : first + local].unsqueeze(1)
            else:
                x = x + F.embedding(inputs.position_ids.t()[first : first + local], self.position)
        return self.dropout(x, inputs.dropout_key)
