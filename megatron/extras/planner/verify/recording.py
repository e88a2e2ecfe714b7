"""What a rank of the copy records of each step, through the interface of an engine.

The training code does not change. Only the engine's `train_batch` is wrapped. It records the
microbatches, the result, and the shards of weights and moments before and after the step.
Gradients are not read from the engine. They follow from the moments, so they are those that the
optimizer has used. In float8, a rank also records what it rounds, before and after rounding.

A trace has the results of the operators that write or read the residual stream: embedding, norms,
attention, MLP, and the complete layer. The order is that of the computation, so the first tensor
that differs is closest to the cause.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.data.batches import Microbatch
from megatron.engine.base import Engine, StepResult
from megatron.engine.engine_base import EngineBase
from megatron.extras.planner.verify.reduction import DROPPED
from megatron.model.gpt import GPT
from megatron.parallel.grid import GridCoordinate

_OPERATORS = re.compile(r"embedding|head\.norm|blocks\.\d+(\.(attention|mlp|\w*norm))?", re.ASCII)
"""Modules whose results are parts of the residual stream."""
_Key = tuple[int, str]
"""Number of the microbatch, and name of the operator."""


@dataclass
class ActivationTrace:
    """The results of operators in one iteration, in their order."""

    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    gradients: dict[_Key, Tensor] = field(default_factory=dict)
    _passes: dict[int, int] = field(default_factory=dict)
    """The number of a stage -> its forward passes."""
    _microbatch: int = 0

    @contextmanager
    def attach(self, stages: Sequence[GPT]) -> Iterator[None]:
        """Record what these stages compute in this context."""
        # The hooks are removed, because closures cannot be stored in a file.
        handles = []
        for number, stage in enumerate(stages):
            begin = partial(self._begin_microbatch, number)
            handles.append(stage.register_forward_pre_hook(begin))
            for name, module in stage.named_modules():
                if _OPERATORS.fullmatch(name):
                    handles.append(module.register_forward_hook(partial(self._record, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_microbatch(self, stage: int, module: object, args: object) -> None:
        # A stage takes microbatches in order. The number in the key of dropout may be wrong.
        self._microbatch = self._passes.get(stage, 0)
        self._passes[stage] = self._microbatch + 1

    def _record(self, name: str, module: object, args: object, output: Tensor) -> None:
        key = self._microbatch, name
        # The backward pass computes recomputed layers again.
        if key in self.outputs:
            return
        self.outputs[key] = output.detach().clone()
        if output.requires_grad:
            output.register_hook(partial(self._record_gradient, key))

    def _record_gradient(self, key: _Key, gradient: Tensor) -> None:
        self.gradients[key] = gradient.detach().clone()


@dataclass(frozen=True)
class RoundedOperand:
    """One operand that a rank has rounded."""

    name: str
    matrix: Tensor | None
    """The rank's values before rounding, [m, k]. None for a weight, whose shards are recorded."""
    values: Tensor
    """The matrix in float8."""
    inverse: Tensor
    """1 / scale, a scalar or [m, 1]."""
    rows: tuple[slice, ...] = ()
    """The rows of the complete weight that the rank multiplies with."""
    largest: Tensor | None = None
    """The largest value of the complete weight, or of each of its rows."""
    by_row: bool = False


@contextmanager
def record_operands(operands: list[RoundedOperand]) -> Iterator[None]:
    """Record what this process rounds to float8 in this context."""
    # The import takes seconds.
    from megatron.extras.step.float8 import products as module

    cls, gradients = module.Float8Products, module._Gradients
    count, get_weight, round_input = cls._count, cls.get_weight, gradients._round_input

    def keep(its: Any, what: str, matrix: Tensor | None, rounded: Any, **further: Any) -> None:
        by_row = its.recipe.rowwise and "backward" not in what
        values, inverse = rounded.values.detach().clone(), rounded.inverse.clone()
        before = None if matrix is None else matrix.detach().clone()
        operands.append(RoundedOperand(what, before, values, inverse, by_row=by_row, **further))

    def record(its: Any, operand: Any, matrices: Any, rounded: Any) -> None:
        for number, (matrix, after) in enumerate(zip(matrices, rounded, strict=True)):
            keep(its, f"{operand} of {its.names[number]}", matrix, after)
        count(its, operand, matrices, rounded)

    def record_weight(its: Any, number: int, weight: Tensor, *, backward: bool) -> Any:
        rounded = get_weight(its, number, weight, backward=backward)
        pieces = its.scales[number].pieces
        rows = tuple(slice(piece.start, piece.start + piece.rows) for piece in pieces)
        name = f"{its.names[number]}.weight{' (backward)' if backward else ''}"
        # Most updates change a largest value, and few of them change its power of two.
        keep(its, name, None, rounded, rows=rows, largest=its.scales[number].values.clone())
        return rounded

    def record_input(its: Any, x: Tensor) -> Any:
        rounded = round_input(its, x)
        # Otherwise the rounded input of the forward pass is kept.
        if not its._products.keeps_input:
            keep(its._products, f"kept input of {its._products.names[0]}", x, rounded)
        return rounded

    with (
        patch.object(cls, "_count", record),
        patch.object(cls, "get_weight", record_weight),
        patch.object(gradients, "_round_input", record_input),
    ):
        yield


Train = Callable[[list[str]], None]
"""Runs a training command line on this rank."""


@dataclass(frozen=True)
class ShardCopy:
    """A copy of a shard of the model or of a moment. See `TensorShard`."""

    kind: str
    name: str
    offset: tuple[int, ...]
    tensor: Tensor

    def select(self, whole: Tensor) -> Tensor:
        """Return the slice of the complete tensor that the shard holds."""
        places = zip(self.offset, self.tensor.shape, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in places)]


@dataclass(frozen=True)
class RecordedStep:
    """One call of `train_batch` on one rank."""

    iteration: int
    rates: tuple[float, float | None]
    """The learning rate, and that of the word embedding and the output matrix."""
    result: StepResult
    microbatches: tuple[Microbatch, ...]
    before: tuple[ShardCopy, ...]
    """Weights and moments before the step."""
    after: tuple[ShardCopy, ...]
    step_count: int
    """The optimizer's number of steps after the step."""
    loss_scale: tuple[float | None, Any]
    """The scale of the step's loss, and the state of the scale after the step. None without fp16.
    """
    trace: ActivationTrace
    operands: tuple[RoundedOperand, ...] = ()
    """What this rank has rounded to float8, in order."""


@dataclass
class RankRecord:
    """Everything that one rank of the copy records."""

    coordinate: GridCoordinate
    steps: list[RecordedStep] = field(default_factory=list)


def run_recorded(train: Train, argv: list[str], path: Path, rank: int) -> None:
    """Train on this rank, and write its record to PATH-RANK.pt.

    Args:
        train: Runs the command line.
        argv: The command line.
        path: The beginning of the file's name.
        rank: This rank.
    """
    # The ranks share the cores.
    torch.set_num_threads(1)
    records: list[RankRecord] = []
    try:
        with _record_engines(records):
            train(argv)
    finally:
        # The steps before an error often show its cause.
        if records:
            file = Path(f"{path}-{rank}.pt")
            torch.save(records[0], file.with_suffix(".partial"))
            file.with_suffix(".partial").rename(file)


def load_records(path: Path, world_size: int) -> list[RankRecord]:
    """Return the records that `run_recorded` has written on all ranks.

    The list is empty if a rank has ended without a record.
    """
    files = [Path(f"{path}-{rank}.pt") for rank in range(world_size)]
    # A rank that was killed has written nothing.
    if not all(file.exists() for file in files):
        return []
    return [torch.load(file, weights_only=False) for file in files]


@contextmanager
def _record_engines(records: list[RankRecord]) -> Iterator[None]:
    """Make each engine that is built in this context record its steps."""
    # Both engines call this constructor, so DeepSpeed's need not be imported here.
    build = EngineBase.__init__

    def build_recorded(engine: Any, *args: Any, **kwargs: Any) -> None:
        build(engine, *args, **kwargs)
        records.append(RankRecord(engine._mesh.coordinate))
        _wrap_engine(engine, records[-1])

    with patch.object(EngineBase, "__init__", build_recorded):
        yield


def _wrap_engine(engine: Any, record: RankRecord) -> None:
    """Replace the `train_batch` of an engine by one that also records the step."""
    train_batch = engine.train_batch

    def record_step(
        microbatches: Sequence[Microbatch], *, iteration: int, lr: float, **further: Any
    ) -> StepResult:
        hooks = []
        if iteration == DROPPED:
            hooks = _make_gradients_infinite(engine)
        # The engine changes its tensors in place.
        before = _copy_shards(engine)
        trace = ActivationTrace()
        operands: list[RoundedOperand] = []
        float8 = engine._plan.config.precision.fp8_format is not None
        recording = record_operands(operands) if float8 else nullcontext()
        with trace.attach(engine.stages), recording:
            result: StepResult = train_batch(microbatches, iteration=iteration, lr=lr, **further)
        rates = lr, further.get("decoupled_lr")
        for hook in hooks:
            hook.remove()
        scalars = engine.get_scalars()
        count = int(scalars["optimizer_step"])
        scale = result.loss_scale, scalars.get("loss_scale")
        batch = tuple(microbatches)
        after = _copy_shards(engine)
        record.steps.append(
            RecordedStep(
                iteration, rates, result, batch, before, after, count, scale, trace, tuple(operands)
            )
        )
        return result

    engine.train_batch = record_step


def _copy_shards(engine: Engine) -> tuple[ShardCopy, ...]:
    return tuple(
        ShardCopy(s.kind, s.name, s.offset, s.tensor.detach().clone())
        for s in engine.shards(optimizer=True)
    )


def _make_gradients_infinite(engine: Engine) -> list[RemovableHandle]:
    """Make the gradient of the output of the first block infinite on the rank that has it.

    The backward pass comes to this block last. So only the parameters of the first block and of the
    embedding get infinite gradients, and other stages have finite ones. The hooks are returned.
    """

    def spoil(module: object, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    blocks = [stage.get_blocks().get(0) for stage in engine.stages]
    return [block.register_forward_hook(spoil) for block in blocks if block is not None]
