"""Linear layers and the embedding, cut over the tensor-parallel ranks (https://arxiv.org/abs/1909.08053, section 3).

Every parameter is a plain local tensor that carries a `ParameterSpec`: its shape in the whole model, along which dimension it is
cut, and whether its gradient is only a part of the sum. Engines, initialisation and checkpoints read nothing else. The invariant: a
rank's part is a box of the global tensor. h: hidden size, s: sequence, b: micro-batch, t: tensor-parallel size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import enter_tensor_parallel, leave_tensor_parallel
from megatron.parallel.mesh import TensorParallel


@dataclass(frozen=True)
class ParameterSpec:
    """How a local tensor relates to the whole model's parameter.

    `shape` counts real rows only; a local tensor may be larger where the vocabulary is padded. `shard_dim` None: every
    tensor-parallel rank holds all of it. `partial_gradient`: each rank sees only its slice of the sequence, so gradients must be
    added up over the tensor-parallel ranks. `copy_of`: it is a copy of the named parameter, which lives on another pipeline stage:
    their gradients must be added up, and it is counted and stored there.
    """

    shape: tuple[int, ...]
    shard_dim: int | None = None
    partial_gradient: bool = False
    copy_of: str | None = None


def make_parameter(local_shape: tuple[int, ...], spec: ParameterSpec) -> nn.Parameter:
    """An uninitialised parameter with its spec; `model/init.py` fills it."""
    parameter = nn.Parameter(torch.empty(local_shape))
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def make_replicated_parameter(shape: tuple[int, ...], tp: TensorParallel) -> nn.Parameter:
    """A parameter that all tensor-parallel ranks hold, used where the sequence may be cut (norms, biases after the sum)."""
    return make_parameter(shape, ParameterSpec(shape, partial_gradient=tp.sequence_parallel))


def split_evenly(size: int, tp: TensorParallel) -> int:
    """This rank's share of a dimension; the plan has refused sizes that do not divide."""
    assert size % tp.size == 0, f"{size} does not divide by tensor-parallel size {tp.size}"
    return size // tp.size


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A = [A_1 .. A_t] cut by columns: each rank computes its own part of the output features.

    The weight is stored transposed, [out/t, in], as F.linear takes it.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        local = split_evenly(out_features, tp)
        self.weight = make_parameter(
            (local, in_features), ParameterSpec((out_features, in_features), shard_dim=0)
        )
        self.bias = (
            make_parameter((local,), ParameterSpec((out_features,), shard_dim=0)) if bias else None
        )

    def forward(self, x: Tensor, *, entered: bool = False) -> Tensor:
        """[s, b, in] (or [s/t, b, in] with sequence parallelism) -> [s, b, out/t].

        `entered`: x has been through `enter_tensor_parallel` already, because several layers share it.
        """
        return F.linear(x if entered else enter_tensor_parallel(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Y = X A + b with A cut by rows and X by columns: the ranks' products are added up, then the bias, once.

              | A_1 |
    [X_1 ..]  | ..  |
              | A_t |
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        local = split_evenly(in_features, tp)
        self.weight = make_parameter(
            (out_features, local), ParameterSpec((out_features, in_features), shard_dim=1)
        )
        self.bias = make_replicated_parameter((out_features,), tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] -> [s, b, out] (or [s/t, b, out] with sequence parallelism)."""
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = leave_tensor_parallel(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table of word vectors cut by rows: rank r holds ids [r v/t, (r + 1) v/t) of the padded vocabulary v."""

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, hidden_size: int, *, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows = split_evenly(padded_vocab_size, tp)
        self.first = tp.rank * self.rows
        self.weight = make_parameter(
            (self.rows, hidden_size), ParameterSpec((vocab_size, hidden_size), shard_dim=0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids [s, b] -> vectors [s, b, h] (or [s/t, b, h] with sequence parallelism)."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.rows)
        local = (tokens - self.first).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_tensor_parallel(vectors, self.tp)
