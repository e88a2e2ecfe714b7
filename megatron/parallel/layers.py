"""Linear layers and the embedding, sharded over the tensor-parallel ranks.

Every parameter is a plain local tensor with a `ParameterSpec`. The spec holds the shape in the
complete model, the kind of initialisation, the dimension that is sharded, and whether the gradient
is partial. Engines, initialisation and checkpoints need nothing else of a layer.

The invariant: a rank's shard is a rectangular slice of the global tensor, or several such slices
one below the other (`Piece`).

h: hidden size, s: sequence, b: micro-batch, t: tensor-parallel size. Source:
https://arxiv.org/abs/1909.08053, section 3.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import leave_tensor_parallel
from megatron.parallel.entered_linear import ALONE, apply_entered_linears
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import trim_columns
from megatron.parallel.parameter_spec import Init, ParameterSpec, Specs, make_matrix_spec
from megatron.parallel.products import Products


def make_parameter(local_shape: tuple[int, ...], spec: ParameterSpec) -> nn.Parameter:
    """Return an uninitialised parameter with its spec. `model/init.py` fills it."""
    parameter = nn.Parameter(torch.empty(local_shape))
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def make_sharded(spec: ParameterSpec, tp: TensorParallel) -> nn.Parameter:
    """Return a parameter of which each tensor-parallel rank holds the part that the spec says."""
    if spec.shard_dim is not None and spec.pieces is None:
        split_evenly(spec.shape[spec.shard_dim], tp)
    return make_parameter(spec.compute_local_shape(tp.size), spec)


def make_replicated_outside_region(spec: ParameterSpec, tp: TensorParallel) -> nn.Parameter:
    """Return a parameter that all tensor-parallel ranks hold.

    It is for places where the sequence may be sharded: norms, learned positions, and the biases of
    `RowParallelLinear`. With sequence parallelism, its gradient is therefore partial.
    """
    return make_parameter(spec.shape, replace(spec, partial_gradient=tp.sequence_parallel))


def make_replicated_inside_region(spec: ParameterSpec, tp: TensorParallel) -> nn.Parameter:
    """Return a parameter that all tensor-parallel ranks hold, each for its own heads or channels.

    It is for places inside a tensor-parallel region. A rank's gradient covers only its own heads
    or channels, even without sequence parallelism.
    """
    return make_parameter(spec.shape, replace(spec, partial_gradient=tp.size > 1))


def split_evenly(size: int, tp: TensorParallel) -> int:
    """Return the size of this rank's part of a dimension.

    The plan refuses sizes that are not divisible, so a remainder is a bug of this program.
    """
    assert size % tp.size == 0, f"{size} is not divisible by tensor-parallel size {tp.size}"
    return size // tp.size


class _ParallelLinear(nn.Module):
    """A layer of which each rank has a shard."""

    _make_bias = staticmethod(make_sharded)
    """Makes the bias, which is sharded or replicated."""

    def __init__(self, specs: Specs, name: str, tp: TensorParallel) -> None:
        """Create the rank's shard of the layer `name`. See `make_linear_specs`."""
        super().__init__()
        self.tp = tp
        self.number: Tensor | None = None
        """The number of a layer whose products add to the weight's gradient in fp32.

        See `weight_gradient.py`.
        """
        self.products: Products | None = None
        """Computes the products in another number format. See `products.py`."""
        self.weight = make_sharded(specs[f"{name}.weight"], tp)
        self.bias: nn.Parameter | None = None
        if f"{name}.bias" in specs:
            self.bias = self._make_bias(specs[f"{name}.bias"], tp)


class ColumnParallelLinear(_ParallelLinear):
    """Y = X A + b with A = [A_1 .. A_t] sharded by columns.

    Each rank computes its own part of the output features. The weight is stored transposed,
    [out/t, in], as F.linear takes it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, in], or [s/t, b, in] with sequence parallelism, to [s, b, out/t].

        The result may have padding. See `apply_entered_linears`.
        """
        # `apply_column_parallel` of one layer, with fewer calls in each layer of each microbatch.
        numbers = [] if self.number is None else [self.number]
        (out,) = apply_entered_linears(
            x, [(self.weight, self.bias)], self.tp, numbers=numbers, products=self.products
        )
        return out


def apply_column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Return the output of each layer of one input, [s, b, out/t]. They may have padding.

    The tensor-parallel region is entered once. Each entry would repeat the communication.
    """
    return apply_entered_linears(
        x,
        [(layer.weight, layer.bias) for layer in layers],
        layers[0].tp,
        numbers=list_numbers(*layers),
        # Those of all layers, because their input is the same.
        products=layers[0].products,
    )


class ReplicatedLinear(nn.Module):
    """Y = X A, with all of A on each rank, outside of the tensor-parallel region.

    With sequence parallelism, a rank multiplies its slice of the sequence. Otherwise all ranks
    compute the same.
    """

    def __init__(self, specs: Specs, name: str, tp: TensorParallel) -> None:
        """Create the weight of the layer `name`."""
        super().__init__()
        self.weight = make_replicated_outside_region(specs[f"{name}.weight"], tp)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, in] to [s, b, out], or [s/t, b, in] to [s/t, b, out]."""
        # No rank needs what another one computes.
        (out,) = apply_entered_linears(x, [(self.weight, None)], ALONE)
        return trim_columns(out, self.weight.shape[0])


class SharedGroupsLinear(nn.Module):
    """The projection to queries, keys and values if there are fewer query groups than ranks.

    The global matrix has for each group the rows of its queries, its key and its value. A rank has
    the queries of n/t heads, which belong to one group. Keys and values of all groups are on every
    rank, because several ranks need the same ones. They are small. A rank computes only those of
    its own group, so the gradients of keys and values must be added up over the ranks.

    n: heads, g: query groups, d: width of a head.
    """

    def __init__(self, specs: Specs, name: str, tp: TensorParallel) -> None:
        """Create the weights for the rank's queries, and for keys and values of all groups.

        Args:
            specs: The specs of this rank. "shared_weight" and "shared_bias" are of keys and values.
            name: Name of the layer.
            tp: The tensor-parallel ranks.
        """
        super().__init__()
        self.tp = tp
        self.products: Products | None = None
        """Computes the products in another number format. See `products.py`."""
        self.weight = make_sharded(specs[f"{name}.weight"], tp)
        shared = specs[f"{name}.shared_weight"]
        self.shared_weight = make_sharded(shared, tp)
        self.bias: nn.Parameter | None = None
        self.shared_bias: nn.Parameter | None = None
        if f"{name}.bias" in specs:
            self.bias = make_sharded(specs[f"{name}.bias"], tp)
            self.shared_bias = make_sharded(specs[f"{name}.shared_bias"], tp)
        assert shared.pieces is not None, "keys and values of each group are a piece"
        groups = len(shared.pieces)
        assert tp.size % groups == 0, f"{groups} query groups do not divide {tp.size} ranks"
        # The rows of this rank's group in the replicated keys and values.
        pair = shared.pieces[0].rows
        group = tp.rank * groups // tp.size
        self.own_pair = slice(group * pair, (group + 1) * pair)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, in], or [s/t, b, in] with sequence parallelism, to [s, b, (n/t + 2) d].

        The result may have padding. See `apply_entered_linears`.
        """
        (out,) = apply_entered_linears(x, [self.join()], self.tp, products=self.products)
        return out

    def join(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of this rank's queries and its group's key and value."""
        weight = torch.cat((self.weight, self.shared_weight[self.own_pair]))
        bias = None
        if self.bias is not None and self.shared_bias is not None:
            bias = torch.cat((self.bias, self.shared_bias[self.own_pair]))
        return weight, bias


class RowParallelLinear(_ParallelLinear):
    """Y = X A + b with A sharded by rows and X by columns.

    The ranks' products are added up, and then the bias is added once.

              | A_1 |
    [X_1 ..]  | ..  |
              | A_t |
    """

    _make_bias = staticmethod(make_replicated_outside_region)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, in/t] to [s, b, out], or to [s/t, b, out] with sequence parallelism.

        The input may have padding.
        """
        if self.tp.size == 1:
            return self._multiply(x, self.bias)
        # Inside the sum, the bias would be added once for each rank.
        y = leave_tensor_parallel(self._multiply(x, None), self.tp)
        if self.bias is None:
            return y
        return y + self.bias

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's product [s, b, out]."""
        # The input is sharded already, so no communication belongs to this product.
        weight = self.weight
        (out,) = apply_entered_linears(
            x,
            [(weight, bias)],
            ALONE,
            numbers=[] if self.number is None else [self.number],
            products=self.products,
        )
        rows = weight.shape[0]
        return out if out.shape[-1] == rows else trim_columns(out, rows)


def list_numbers(*layers: ColumnParallelLinear | RowParallelLinear) -> list[Tensor]:
    """Return the numbers of the layers whose products add to the weights' gradients."""
    return [layer.number for layer in layers if layer.number is not None]


class VocabParallelEmbedding(nn.Module):
    """A table of word vectors, sharded by rows.

    Rank r holds ids [r v/t, (r + 1) v/t) of the padded vocabulary v.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: TensorParallel,
        init: Init,
    ) -> None:
        """Create the rank's rows of the table. `init` is the kind of its initial values."""
        super().__init__()
        self.tp = tp
        self.rows = split_evenly(padded_vocab_size, tp)
        self.first = tp.rank * self.rows
        self.weight = make_parameter(
            (self.rows, hidden_size), make_matrix_spec(vocab_size, hidden_size, init, shard_dim=0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids [s, b] to vectors [s, b, h], or [s/t, b, h] with sequence parallelism."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        # Ids of other ranks look up row 0 here, and their vectors are set to zero. The sum over the
        # ranks then has the vector of the one rank that holds the id.
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.rows)
        local = (tokens - self.first).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_tensor_parallel(vectors, self.tp)
