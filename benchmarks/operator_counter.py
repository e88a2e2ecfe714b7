"""Count what operators on a fake GPU read, write and compute, by the part of the model they serve.

The fake GPU (docs/dry_run.md) runs a training step without values. This module sees each operator
with its arguments. Import it only in a process with the fake GPU, because it imports torch.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from operator_work import ATTENTION, ATTENTION_BACKWARD, PRODUCTS, Case, Counts, Work
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.dry_run.fake_rank import FakeRank, get_gpu, run_rank
from megatron.plan.resolve import resolve

_PARTS = {
    "model/loss.py": "loss",
    "model/tally.py": "loss",
    "model/positions.py": "rotary positions",
    "model/mlp.py": "activation of the MLP",
    "model/block.py": "residuals",
    "model/norm.py": "norms",
    "model/dropout.py": "dropout",
    "model/attention.py": "attention, other operators",
    "model/attention_core.py": "attention, other operators",
    "model/embedding.py": "embedding",
    "engine/runner.py": "sums of losses and vectors",
    "engine/native.py": "optimizer",
    "engine/optimizer.py": "optimizer",
}
"""File that calls an operator, directly or through files outside of this table -> the part."""
_RESIDUALS = "residuals"
_GRADIENT_SUMS = "sums of gradients"
_LINEAR = "linear layers, without products"
_LAYERS = ("parallel/layers.py", "parallel/entered_linear.py", "parallel/weight_gradient.py")
_SKIPPED = ("extras/planner/dry_run/", "extras/step/kernels/")
"""Files that call operators for another file."""
_PRODUCT_NAMES = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Products -> the position of the first factor among the arguments."""
_NO_KERNEL = {"_unsafe_view", "lift_fresh", "record_stream", "resize_", "set_"}
_NO_KERNEL |= {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
"""Operators that move no bytes and are no views."""
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "bernoulli_"}
_OVERWRITES |= {"uniform_", "normal_", "random_"}
"""Operators that write their first argument without reading it."""
_SELECTIONS = {"gather", "index_select", "embedding", "index"}
"""Operators that read as many elements of their first argument as they return."""


def count_case(case: Case) -> Counts:
    """Run a training step of a case on the fake GPU, and return its work.

    The first microbatch writes gradients, and each further one adds to them. So steps of one and of
    two microbatches are run, and the difference is added for each further microbatch.
    """
    one = count_step(case.flags, 1)
    if case.microbatches == 1:
        return one
    two = count_step(case.flags, 2)
    further = case.microbatches - 2
    nothing = Work()
    return {key: work + (work - one.get(key, nothing)).times(further) for key, work in two.items()}


def count_step(flags: str, microbatches: int) -> Counts:
    """Run a training step of one GPU on the fake GPU.

    Returns:
        (part, operator) -> its work.
    """
    plan = resolve(load_config(flags.split()).config, 1)
    counter = OperatorCounter()
    # Nodes of the backward pass then know which lines have made them.
    anomalies = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with anomalies, get_gpu().watch(counter.count):
        # The construction of the engine is no part of the step.
        run_rank(plan, 0, microbatches, visit=counter.start)
    return dict(counter.counts)


class OperatorCounter:
    """Counts operators of the fake GPU."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.counts: dict[tuple[str, str], Work] = defaultdict(Work)
        self._parameter_shapes: set[tuple[int, ...]] = set()

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator. See `FakeGpu.watch`."""
        work = count_operator(func, args, kwargs, out)
        if work.calls:
            self.counts[self._find_part(func, out), func._opname] += work

    def start(self, rank: FakeRank) -> None:
        """Forget what was counted, and learn the shapes of a rank's parameters."""
        self.counts.clear()
        for stage in rank.engine.stages:
            self._parameter_shapes.update(tuple(each.shape) for each in stage.parameters())

    def _find_part(self, func: Any, out: Any) -> str:
        """Return the part of the step that an operator belongs to."""
        name = func._opname
        if "dot_product" in name or "flash_attention" in name or "varlen_attn" in name:
            if "backward" in name:
                return ATTENTION_BACKWARD
            return ATTENTION
        if name in _PRODUCT_NAMES:
            return PRODUCTS
        node = torch._C._current_autograd_node()
        if node is None:
            return _find_caller(_list_frames())
        if node.name() == "torch::autograd::AccumulateGrad":
            return _GRADIENT_SUMS
        # Between two nodes, autograd casts gradients of weights to fp32, and adds up the gradients
        # of a tensor with several uses.
        # It writes these sums into new tensors.
        is_sum = func is torch.ops.aten.add.Tensor
        if is_sum or name == "_to_copy":
            wide = isinstance(out, Tensor) and out.dtype == torch.float32
            if wide and tuple(out.shape) in self._parameter_shapes:
                return _GRADIENT_SUMS
        if is_sum:
            return _RESIDUALS
        metadata: Any = node.metadata
        return _find_caller(_list_lines(metadata.get("traceback_", [])))


def _list_frames() -> Iterable[str]:
    """Yield the files of this project that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/megatron/" in path:
            yield path.rpartition("/megatron/")[2]
        frame = frame.f_back


def _list_lines(traceback: list[str]) -> Iterable[str]:
    """Yield the files of this project in a formatted traceback, the innermost first."""
    for entry in reversed(traceback):
        for line in reversed(entry.splitlines()):
            if "/megatron/" in line and line.lstrip().startswith("File "):
                yield line.rpartition("/megatron/")[2].partition('"')[0]


def _find_caller(files: Iterable[str]) -> str:
    """Return the part of the first file that has one."""
    in_layer = False
    for file in files:
        if file.startswith(_SKIPPED):
            continue
        in_layer |= file in _LAYERS
        part = _PARTS.get(file)
        if part is not None:
            # The table of the embedding is such a layer too.
            if in_layer and part != "embedding":
                return _LINEAR
            return part
    return "other"


def count_operator(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """Return the work of an operator that was called with these arguments and results.

    An argument is read once and a result is written once. An argument that is changed in place is
    read and written. Views and tensors of the host count nothing. An expanded tensor counts with
    the size that it has in memory.
    """
    name = func._opname
    if func.namespace == "prim" or func.is_view or name in _NO_KERNEL:
        return Work()
    reads = writes = 0
    for argument, value in _list_arguments(func, args, kwargs):
        size = _count_bytes(value)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        # AdamW changes gradients only if it has a factor for them.
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            changed = False
        if changed:
            writes += size
        if not (changed and (argument.is_out or name in _OVERWRITES)):
            reads += size
    returns = func._schema.returns
    results = (out,) if len(returns) == 1 else out or ()
    for described, result in zip(returns, results, strict=True):
        if described.alias_info is None:
            writes += _count_bytes(result)
    if name in _SELECTIONS:
        reads += _count_bytes(out) - _count_bytes(args[0])
    if name == "scatter_add_":
        # It changes the elements that the index names, and no others.
        unchanged = _count_bytes(args[0]) - args[2].numel() * args[0].element_size()
        reads -= unchanged
        writes -= unchanged
    return Work(reads, writes, _count_flops(func, args, kwargs, out), 1)


def _list_arguments(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, Any]]:
    """Yield the description and the value of each argument that was given."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _count_bytes(value: Any) -> int:
    """Return the bytes of a tensor on the GPU, or of those in a list."""
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return 0
    pairs = zip(value.shape, value.stride(), strict=True)
    # A dimension with stride 0 is read from the same memory again and again.
    return value.element_size() * math.prod(size for size, stride in pairs if stride or size == 0)


def _count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a product or of an attention kernel. Of causal attention it is half."""
    factor = _PRODUCT_NAMES.get(func._opname)
    if factor is not None:
        return 2 * out.numel() * args[factor].shape[-1]
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0
    flops: int = count(*args, **kwargs, out_val=out)
    given = {argument.name: value for argument, value in _list_arguments(func, args, kwargs)}
    if given.get("is_causal"):
        flops //= 2
    return flops
