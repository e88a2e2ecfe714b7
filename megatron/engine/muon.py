"""Muon, an optimizer that updates a matrix with its orthogonalised momentum.

It updates the matrices of the layers. AdamW updates embeddings, the output matrix, biases and
norms. The fused projection to queries, keys and values counts as three matrices. The formulas are
those of `torch.optim.Muon`. The choices of scale and coefficients are Megatron-LM's.
Source: https://kellerjordan.github.io/posts/muon/.

Orthogonalisation needs a whole matrix, but tensor parallelism and ZeRO leave only a part of it on
each rank. So each matrix has an owner among the ranks that share a copy of its stage. In a step,
the ranks send the owner their parts of the momentum, and it sends back their parts of the update.
Momentum and weight stay where they are.

The owners are chosen by `assign_owners`, so that all ranks do about the same work. A step has
rounds. In a round, each rank owns at most one matrix, which limits the memory to a few copies of
the largest matrix. All ranks compute the same assignment without communication.

The invariant: an owner orthogonalises the same numbers as a single process would, in the same
precision. So the layout changes an update only as far as it changes gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.optimizer import OPTIMIZERS, OptimizerConfig
from megatron.engine.optimizer import (
    AdamW,
    MasterParameter,
    Masters,
    Optimizer,
    open_in_fp32,
    scale_gradients,
)
from megatron.engine.parallelize import shard_offset
from megatron.model.fused_operators import FusedOperators
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

_EPS = 1e-7
"""Smallest norm that a matrix is divided by, as in torch."""
_COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    # https://leloykun.github.io/ponder/muon-opt-coeffs/
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Name -> the coefficients of each step. After the last of them, the first ones follow."""


@dataclass(frozen=True)
class Part:
    """The rectangle of a matrix that one rank holds."""

    offset: tuple[int, int]
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """Number of elements, which is 0 if the rank holds nothing of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def index(self) -> tuple[slice, slice]:
        """The index of the rectangle in the matrix."""
        rows, columns = self.shape
        row, column = self.offset
        return slice(row, row + rows), slice(column, column + columns)


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a layer. Each rank of its stage holds a part of it."""

    master: MasterParameter
    parts: tuple[Part, ...]
    """The part of each rank of the stage."""
    shape: tuple[int, int]
    blocks: tuple[Sequence[slice], ...]
    """The row ranges of each block, which is orthogonalised by itself.

    A fused projection has three blocks, and any other matrix has one. The rows of a block may be in
    several ranges. All ranges of a block have the same number of rows.
    """
    scales: Tensor
    """The factor on the update of each row of this rank's part, [rows, 1] in fp32."""


def choose_precision(config: OptimizerConfig, *, in_fp32: bool) -> torch.dtype:
    """Return the dtype of the products.

    Args:
        config: The optimizer's configuration.
        in_fp32: Whether the run is in fp32.
    """
    automatic = torch.float32 if in_fp32 else torch.bfloat16
    choices = {"auto": automatic, "medium": torch.bfloat16, "high": torch.float32}
    return choices[config.muon_fp32_matmul_prec]


class Muon(Optimizer):
    """Muon for the matrices of the layers, and AdamW for all other parameters."""

    row = OPTIMIZERS.require("muon")

    def __init__(
        self,
        masters: list[MasterParameter],
        config: OptimizerConfig,
        shape: ModelShape,
        mesh: Mesh,
        *,
        in_fp32: bool = False,
    ) -> None:
        """Create the states, filled with zeros. All ranks must call it.

        Args:
            masters: The parameters of this rank.
            config: The optimizer's configuration.
            shape: Sizes of the model. They determine the rows of fused projections.
            mesh: This rank's mesh.
            in_fp32: Whether the run is in fp32.
        """
        super().__init__(masters, config)
        own = [master for master in masters if master.weight in self.states]
        self._adamw = AdamW([m for m in masters if m.weight not in self.states], config)
        self.states |= self._adamw.states
        self._mesh = mesh
        self._group = mesh.build_stage_group()
        # Each copy of the model computes its own updates, from the same gradients.
        self._rank = mesh.sharding.rank * mesh.grid.tensor + mesh.coordinate.tensor
        self._dtype = choose_precision(config, in_fp32=in_fp32)
        self._matrices = [_describe_matrix(m, config, shape, mesh) for m in own]
        ranks = mesh.sharding.size * mesh.grid.tensor
        owners = assign_owners([_count_work(matrix) for matrix in self._matrices], ranks)
        owned = [
            [m for m, owner in zip(self._matrices, owners, strict=True) if owner == rank]
            for rank in range(ranks)
        ]
        self._rounds = [
            [matrices[number] if number < len(matrices) else None for matrices in owned]
            for number in range(max(map(len, owned)))
        ]
        self.description = (
            "optimizer",
            f"Muon for {len(self._matrices)} matrices, {self._adamw.description[1]} for the rest",
            f"--optimizer muon; this rank orthogonalises {len(owned[self._rank])} of them",
        )

    @classmethod
    def build(cls, masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators) -> Self:
        """Build the optimizer. See `Optimizer.build`."""
        precision = plan.config.precision
        in_fp32 = not (precision.bf16 or precision.fp16)
        return cls(masters, plan.config.optimizer, plan.shape, mesh, in_fp32=in_fp32)

    def set_step_count(self, count: int) -> None:
        """Set the number of steps, which AdamW's bias correction depends on."""
        super().set_step_count(count)
        self._adamw.set_step_count(count)

    @torch.no_grad()
    def step(self, lr: float, decoupled_lr: float | None = None, factor: float = 1.0) -> None:
        """Update the weights. All ranks must call it. See `Optimizer.step`."""
        self.step_count += 1
        # No matrix of a layer is decoupled.
        self._adamw.step(lr, decoupled_lr, factor)
        scale_gradients([matrix.master for matrix in self._matrices], factor)
        for matrices in self._rounds:
            self._update(matrices, lr)

    def _update(self, matrices: Sequence[_Matrix | None], lr: float) -> None:
        """Update one round's matrices.

        Args:
            matrices: The matrix of each owner, or None if the owner has none in this round.
            lr: The learning rate.
        """
        pieces = [None if m is None else self._advance_momentum(m) for m in matrices]
        own = matrices[self._rank]
        received = self._exchange(
            [torch.empty(0) if piece is None else piece.flatten() for piece in pieces],
            [0] * len(matrices) if own is None else [part.size for part in own.parts],
        )
        updates = [torch.empty(0)] * len(matrices)
        if own is not None:
            whole = self._orthogonalise(own, received)
            updates = [whole[part.index].flatten() for part in own.parts]
        returned = self._exchange(
            updates, [0 if piece is None else piece.numel() for piece in pieces]
        )
        for matrix, update in zip(matrices, returned, strict=True):
            if matrix is None:
                continue
            weight = matrix.master.weight
            # The factors of the parametrization on rate and decay cancel.
            weight.mul_(1.0 - lr * self._config.weight_decay)
            # The scales are applied here, because bf16 would round them.
            rate = lr * matrix.master.scaling.rate
            weight.addcmul_(update.view_as(weight).float(), matrix.scales, value=-rate)

    def _advance_momentum(self, matrix: _Matrix) -> Tensor:
        """Add the gradient to this rank's momentum, and return what is to be orthogonalised."""
        gradient = matrix.master.weight.grad
        assert gradient is not None, f"{matrix.master.name} got no gradient"
        decay = self._config.muon_momentum
        with open_in_fp32([self.get_moment(matrix.master, "momentum")]) as (momentum,):
            momentum.lerp_(gradient, 1.0 - decay)
        if self._config.muon_nesterov:
            return gradient.lerp(momentum, decay)
        return momentum

    def _orthogonalise(self, matrix: _Matrix, received: Sequence[Tensor]) -> Tensor:
        """Return the orthogonal update of a whole matrix from the parts of all ranks."""
        whole = torch.empty(matrix.shape, dtype=self._dtype, device=self._mesh.device)
        for part, values in zip(matrix.parts, received, strict=True):
            whole[part.index] = values.view(part.shape)
        config = self._config
        update = torch.empty_like(whole)
        for places in matrix.blocks:
            block = torch.cat([whole[rows] for rows in places])
            ortho = orthogonalise(block, config.muon_num_ns_steps, config.muon_coefficient_type)
            for rows, values in zip(places, ortho.chunk(len(places)), strict=True):
                update[rows] = values
        return update

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send a flat tensor to each rank of the stage, and return what each of them sent.

        Args:
            sent: The tensor for each rank. It is sent in the precision of the products.
            sizes: The number of elements that each rank sends to this one.
        """
        device = self._mesh.device
        flat = torch.cat([tensor.to(device=device, dtype=self._dtype) for tensor in sent])
        if self._group is None:
            return [flat]
        received = flat.new_empty(sum(sizes))
        with self._mesh.tensor_parallel.comm_timer():
            dist.all_to_all_single(
                received,
                flat,
                list(sizes),
                [tensor.numel() for tensor in sent],
                group=self._group,
            )
        return received.split(list(sizes))


def orthogonalise(matrix: Tensor, steps: int, coefficients: str) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1.

    The Newton-Schulz iteration applies an odd polynomial to the singular values. They do not
    converge to 1 exactly, and Muon does not need that.

    Args:
        matrix: [m, n], fp32 or bf16. The products are computed in its dtype.
        steps: Number of iterations.
        coefficients: A key of `_COEFFICIENTS`.
    """
    # The products with the shorter side are cheaper.
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    # The norm is at least the largest singular value, which must be at most 1.
    x = x / x.norm().clamp(min=_EPS)
    table = _COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = table[step % len(table)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def compute_scale(rows: int, columns: int, config: OptimizerConfig) -> float:
    """Return the factor on an orthogonalised matrix, whose singular values are near 1."""
    factors = {
        "spectral": math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }
    return factors[config.muon_scale_mode] * config.muon_extra_scale_factor


def assign_owners(work: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each matrix.

    The most expensive matrix that has no owner yet goes to the rank with the least work so far. The
    largest load of a rank is then at most 4/3 of the smallest possible one.

    Args:
        work: The work of each matrix, in any unit.
        ranks: Number of ranks.
    """
    load = [0] * ranks
    owners = [0] * len(work)
    # Sorting is stable, so all ranks get the same result.
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += work[index]
    return owners


def _count_work(matrix: _Matrix) -> int:
    """Return the number of multiplications of one Newton-Schulz step on all blocks of a matrix."""
    work = 0
    for places in matrix.blocks:
        rows = sum(place.stop - place.start for place in places)
        short, long = sorted((rows, matrix.shape[1]))
        work += 2 * short * short * long + short**3
    return work


def _describe_matrix(
    master: MasterParameter, config: OptimizerConfig, shape: ModelShape, mesh: Mesh
) -> _Matrix:
    rows, columns = master.spec.shape
    size = mesh.sharding.size
    first = 0
    if master.spec.by_expert:
        first, rows, parts = _list_expert_parts((rows, columns), mesh)
    else:
        parts = list_parts((rows, columns), master.spec.shard_dim, size, mesh.grid.tensor)
    own = parts[mesh.sharding.rank * mesh.grid.tensor + mesh.coordinate.tensor]
    corner = master.offset[0] - first, master.offset[1]
    held = Part(corner, (len(master.weight), master.weight.shape[1]))
    assert own == held, f"{master.name} has the part {held} on this rank, but {own} was computed"
    blocks = list_blocks(master.name, rows, shape)
    if master.spec.by_expert:
        height = master.spec.shape[0] // (shape.config.num_experts or 1)
        blocks = tuple([slice(row, row + height)] for row in range(0, rows, height))
    scales = torch.empty((rows, 1))
    for places in blocks:
        scale = compute_scale(sum(p.stop - p.start for p in places), columns, config)
        for rows_of_block in places:
            scales[rows_of_block] = scale
    return _Matrix(
        master,
        parts,
        (rows, columns),
        blocks,
        scales[own.index[0]].to(master.weight.device),
    )


def list_parts(
    shape: tuple[int, int], shard_dim: int | None, data: int, tensor: int
) -> tuple[Part, ...]:
    """Return the part of each rank of a stage, in the order of the ranks.

    Tensor parallelism shards first, along `shard_dim`. FSDP2 then shards the rows of the result
    over the data-parallel ranks.

    Args:
        shape: Shape of the matrix.
        shard_dim: The dimension that tensor parallelism shards, or None if all ranks hold it.
        data: Number of data-parallel ranks that share one copy of the model.
        tensor: Number of tensor-parallel ranks.
    """
    local = list(shape)
    if shard_dim is not None:
        local[shard_dim] //= tensor
    parts = []
    for data_rank in range(data):
        first = shard_offset(local[0], data_rank, data)
        last = shard_offset(local[0], data_rank + 1, data)
        for tensor_rank in range(tensor):
            offset = [first, 0]
            if shard_dim is not None:
                offset[shard_dim] += tensor_rank * local[shard_dim]
            parts.append(Part((offset[0], offset[1]), (last - first, local[1])))
    return tuple(parts)


def _list_expert_parts(shape: tuple[int, int], mesh: Mesh) -> tuple[int, int, tuple[Part, ...]]:
    """Return which experts the ranks of a copy of the stage have together.

    They may have some of the experts only. These are then a matrix of their own.

    Args:
        shape: Shape of the matrices of all experts, one below the other.
        mesh: This rank's mesh.

    Returns:
        The first row and the number of rows, and each rank's part of them.
    """
    experts = mesh.expert_parallel
    assert experts is not None, "a model with experts has their ranks"
    ranks = mesh.sharding.size * mesh.grid.tensor
    together = min(experts.size, ranks)
    local = shape[0] // experts.size
    parts = []
    for rank in range(ranks):
        place, shard = rank % together, rank // together
        begin = shard_offset(local, shard, experts.sharding.size)
        end = shard_offset(local, shard + 1, experts.sharding.size)
        parts.append(Part((place * local + begin, 0), (end - begin, shape[1])))
    first = (experts.rank - experts.rank % together) * local
    return first, together * local, tuple(parts)


def list_blocks(name: str, rows: int, shape: ModelShape) -> tuple[Sequence[slice], ...]:
    """Return the row ranges of each block of a matrix. See `_Matrix.blocks`.

    The rows of a fused projection are ordered by group: its query heads, its key and its value.
    """
    if not name.endswith("attention.qkv.weight"):
        return ((slice(0, rows),),)
    head = shape.head_dim
    group = rows // shape.query_groups
    starts = range(0, rows, group)
    queries = group - 2 * head
    return (
        [slice(start, start + queries) for start in starts],
        [slice(start + queries, start + queries + head) for start in starts],
        [slice(start + queries + head, start + group) for start in starts],
    )
