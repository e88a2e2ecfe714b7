"""GPT and Llama shapes as one module: embedding, blocks, final norm and output projection.

Parameter names are global: a block is called by its number in the whole model. tokens and labels are [b, s], activations [s, b, h].
"""

import torch
from torch import Tensor, nn

from megatron.model.block import Block
from megatron.model.embedding import Embedding
from megatron.model.loss import VocabSlice, cross_entropy
from megatron.model.norm import build_norm
from megatron.model.positions import PositionTables
from megatron.model.shape import ModelShape
from megatron.parallel.collectives import enter_tensor_parallel
from megatron.parallel.layers import ParameterSpec, make_parameter, split_evenly
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import RandomStreams


class Head(nn.Module):
    """Final norm, and the output matrix unless it is tied to the word embedding."""

    def __init__(self, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        config = shape.config
        self.norm = build_norm(config, tp)
        self.weight: nn.Parameter | None = None
        if config.untie_embeddings_and_output_weights:
            rows = split_evenly(shape.padded_vocab_size, tp)
            spec = ParameterSpec((shape.vocab_size, config.hidden_size), cut_dim=0)
            self.weight = make_parameter((rows, config.hidden_size), spec)


class GPT(nn.Module):
    def __init__(self, shape: ModelShape, tp: TensorParallel, streams: RandomStreams) -> None:
        super().__init__()
        self.shape = shape
        self.tp = tp
        self.streams = streams
        self.embedding = Embedding(shape, tp, streams)
        self.blocks = nn.ModuleDict({str(i): Block(shape, i, tp, streams) for i in range(shape.config.num_layers)})
        self.head = Head(shape, tp)
        self._positions = PositionTables(shape, tp)
        rows = split_evenly(shape.padded_vocab_size, tp)
        first = tp.rank * rows
        self._vocab = VocabSlice(first, min(max(shape.vocab_size - first, 0), rows))

    def forward(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """The microbatch's mean loss, a scalar in fp32. tokens, labels, loss_mask: [b, s]."""
        hidden = self._hidden(tokens)
        mask = None if loss_mask is None else loss_mask.t()
        return cross_entropy(hidden, self._output_weight(), labels.t(), self._vocab, self.tp, mask)

    def logits(self, tokens: Tensor) -> Tensor:
        """[b, s] -> logits of this rank's real ids in fp32, [b, s, v/t] without padding."""
        hidden = self._hidden(tokens)
        return torch.nn.functional.linear(hidden, self._output_weight()[: self._vocab.real]).float().transpose(0, 1)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """The input of the output projection, [s, b, h]."""
        x = self.embedding(tokens)
        positions = self._positions.at(tokens.shape[1], x.device, x.dtype)
        for block in self.blocks.values():
            x = block(x, positions)
        return enter_tensor_parallel(self.head.norm(x), self.tp)

    def _output_weight(self) -> Tensor:
        return self.embedding.word.weight if self.head.weight is None else self.head.weight
