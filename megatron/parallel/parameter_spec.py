"""What a parameter is in the complete model, and which part of it a rank holds.

h: hidden size, t: tensor-parallel size. This module imports no torch, so that sizes can be counted
from the same specs that modules are built from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Init(Enum):
    """The kind of a parameter's initial values. `model/init.py` has the standard deviations."""

    NORMAL = "normal"
    TABLE = "normal, table"
    """Normal with a standard deviation that no width changes, for a row of each token or position.
    """
    VECTOR = "normal, vector"
    """The same for a parameter of each head."""
    SCALED_NORMAL = "scaled normal"
    """Normal with a smaller standard deviation, for matrices that write to the residual stream."""
    ZERO = "zero"
    ONE = "one"
    XIELU_P = "xIELU, positive side"
    """A constant whose softplus is 0.8."""
    XIELU_N = "xIELU, negative side"
    """A constant whose softplus is 0.3. xIELU adds 0.5 to it, which gives 0.8."""
    CONVOLUTION = "uniform, convolution"
    """Uniform in +- 1 / sqrt(k) for a kernel of k tokens."""
    DECAY_RATE = "log of uniform"
    """The logarithm of a uniform value from 0.01 to 16."""
    TIME_STEP = "time step"
    """1, or a value whose softplus is log-uniform from 0.001 to 0.1."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a local tensor that are also neighbours in the global tensor."""

    local: int
    """First row in the tensor of this tensor-parallel rank."""
    start: int
    """First row in the global tensor."""
    rows: int


@dataclass(frozen=True)
class ParameterSpec:
    """The relation between a local tensor and the complete model's parameter."""

    shape: tuple[int, ...]
    """Shape of the global tensor, without vocabulary padding.

    A local tensor may include padding.
    """
    init: Init
    """The kind of its initial values. It has no default, so no parameter gets one by mistake."""
    decays: bool
    """Whether weight decay applies. Muon updates the matrices of the layers that decay."""
    shard_dim: int | None = None
    """The dimension that is sharded. None: every tensor-parallel rank holds all of the tensor."""
    partial_gradient: bool = False
    """Whether a rank's gradient covers only its slice of the sequence, or its heads or channels.

    Such gradients must be added up over the tensor-parallel ranks.
    """
    copy_of: str | None = None
    """The parameter on another pipeline stage that this one is a copy of.

    The gradients of both must be added up. The original is counted and stored, and the copy is not.
    """
    rows_of: str | None = None
    """The attribute of the same module under whose name the global tensor is stored.

    This parameter has some rows of that tensor. `pieces` says which.
    """
    pieces: tuple[Piece, ...] | None = None
    """Where the rows of the local tensor are in the global one.

    None: the rows are all rows, or the rank's equal part of dimension `shard_dim`.
    """
    by_expert: bool = False
    """Whether the expert-parallel ranks hold different rows. See `ExpertParallel`."""

    @property
    def is_sharded(self) -> bool:
        """Whether the tensor-parallel ranks hold different parts of the tensor."""
        return self.shard_dim is not None

    def compute_offset(self, shape: Sequence[int], tensor_rank: int) -> list[int]:
        """Return the offset of a tensor-parallel rank's tensor in the global one.

        For a parameter in `pieces` it is 0, because rows count in the local tensor then.

        Args:
            shape: The shape of the local tensor.
            tensor_rank: The tensor-parallel rank.
        """
        offset = [0] * len(self.shape)
        if self.shard_dim is not None and self.pieces is None:
            offset[self.shard_dim] = tensor_rank * shape[self.shard_dim]
        return offset

    def compute_local_shape(self, tensor_size: int, expert_size: int = 1) -> tuple[int, ...]:
        """Return the shape of a rank's tensor, without vocabulary padding.

        Args:
            tensor_size: Number of tensor-parallel ranks.
            expert_size: Number of expert-parallel ranks.
        """
        local = list(self.shape)
        if self.pieces is not None:
            local[0] = sum(piece.rows for piece in self.pieces)
        elif self.by_expert:
            local[0] //= expert_size
        elif self.shard_dim is not None:
            local[self.shard_dim] //= tensor_size
        return tuple(local)

    def get_global_name(self, name: str) -> str:
        """Return the name that a parameter `name` of a module has in the complete model."""
        if self.rows_of is not None:
            return f"{name.rpartition('.')[0]}.{self.rows_of}"
        return self.copy_of or name

    def locate_rows(self, first: int, rows: int) -> Iterator[Piece]:
        """Yield the pieces of the global tensor in a range of rows, without vocabulary padding.

        Args:
            first: The first row of the range. It counts in the local tensor if there are `pieces`,
                and otherwise in the global tensor.
            rows: Number of rows in the range.

        Yields:
            Pieces whose `local` counts from the first row of the range.
        """
        pieces = self.pieces or (Piece(0, 0, self.shape[0]),)
        for piece in pieces:
            begin = max(first, piece.local)
            end = min(first + rows, piece.local + piece.rows)
            if begin < end:
                yield Piece(begin - first, piece.start + begin - piece.local, end - begin)


Specs = dict[str, ParameterSpec]
"""Name of a parameter inside its part -> its spec."""


def make_matrix_spec(
    rows: int, columns: int, init: Init, *, shard_dim: int | None = None
) -> ParameterSpec:
    """Return the spec of a matrix, to which weight decay applies."""
    return ParameterSpec((rows, columns), init, decays=True, shard_dim=shard_dim)


def make_vector_spec(size: int, init: Init, *, shard_dim: int | None = None) -> ParameterSpec:
    """Return the spec of a bias or another vector, to which weight decay does not apply."""
    return ParameterSpec((size,), init, decays=False, shard_dim=shard_dim)


def make_linear_specs(
    name: str, rows: int, columns: int, init: Init, *, bias: bool, shard_dim: int
) -> Specs:
    """Return the specs of a linear layer, without its bias if it has none.

    Args:
        name: Name of the layer inside its part.
        rows: Outputs.
        columns: Inputs.
        init: The kind of the weight's initial values. The bias starts at zero.
        bias: Whether there is a bias.
        shard_dim: 0 for `ColumnParallelLinear`, 1 for `RowParallelLinear`.
    """
    specs = {f"{name}.weight": make_matrix_spec(rows, columns, init, shard_dim=shard_dim)}
    if bias:
        of_bias = 0 if shard_dim == 0 else None
        specs[f"{name}.bias"] = make_vector_spec(rows, Init.ZERO, shard_dim=of_bias)
    return specs
