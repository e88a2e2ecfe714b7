"""The messages of a rank, compared with what the core declares, and what happens to gradients.

`spmd_types` does not follow gradients and sums between the backward pass and the update. Here each
tensor that matters has labels: which parameter, or which sum, its elements belong to, what it was
multiplied by, and over which ranks it was added up. Every operator that copies, scales or adds up
labelled elements changes their labels.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.engine.pipeline_runner import _Stage, _StageModule
from megatron.extras.planner.dry_run.fake_gpu import find_line, name_dtype
from megatron.extras.planner.types.check import STEP, Message, RankTypes, Transfer
from megatron.extras.planner.types.forward import (
    Offsets,
    choose_variant,
    find_group,
    list_offsets,
    list_ranks,
)
from megatron.extras.watch.operator_mode import CollectiveCall, OperatorMode
from megatron.parallel.spmd import DECLARED, SpmdRule

_PRODUCTS = ("mul", "mul_", "_foreach_mul_")
_DIVISIONS = ("div", "div_", "_foreach_div_")
_COPIES = ("_to_copy", "clone", "clamp")


@dataclass(frozen=True)
class Label:
    """What some neighbouring elements of a storage are."""

    start: int
    count: int
    name: str
    factor: float = 1.0
    """The product of all factors since the backward pass, also those of means over ranks."""
    sums: tuple[Offsets, ...] = ()
    """The groups over which it was added up, in order."""
    zeroed: bool = False
    """Whether it was multiplied by 0, so that the sum is another rank's value."""


class GradientFlow:
    """Labels of tensors."""

    def __init__(self) -> None:
        """Label nothing."""
        self._labels: dict[int, tuple[Any, list[Label]]] = {}
        self.read: list[Label] = []
        """The labels of what the host has read."""

    def clear(self) -> None:
        """Forget all labels."""
        self._labels.clear()
        self.read.clear()

    def mark(self, tensor: Tensor, name: str, **state: Any) -> None:
        """Label all elements of a contiguous tensor."""
        label = Label(int(tensor.storage_offset()), tensor.numel(), name, **state)
        self._replace(tensor, [label])

    def find(self, tensor: Tensor) -> list[Label]:
        """Return the labels of a tensor's elements. Their start counts from the tensor's."""
        # Views share a storage, so labels belong to places in it.
        storage = tensor.untyped_storage()
        _, labels = self._labels.get(storage._cdata, (None, []))
        begin, end = _find_extent(tensor)
        found = []
        for label in labels:
            first = max(begin, label.start)
            last = min(end, label.start + label.count)
            if first < last:
                found.append(replace(label, start=first - begin, count=last - first))
        return found

    def _replace(self, tensor: Tensor, labels: Sequence[Label]) -> None:
        """Replace the labels of a tensor's elements. Their start counts in the storage."""
        storage = tensor.untyped_storage()
        _, others = self._labels.get(storage._cdata, (None, []))
        begin, end = _find_extent(tensor)
        kept: list[Label] = []
        for label in others:
            stop = label.start + label.count
            if label.start < begin:
                kept.append(replace(label, count=min(stop, begin) - label.start))
            if stop > end:
                first = max(label.start, end)
                kept.append(replace(label, start=first, count=stop - first))
        # The reference keeps the address from being used again.
        self._labels[storage._cdata] = (storage, [*kept, *labels])

    def _change(self, tensor: Tensor, **changes: Any) -> None:
        offset = int(tensor.storage_offset())
        labels = self.find(tensor)
        if labels:
            moved = [replace(each, start=each.start + offset) for each in labels]
            self._replace(tensor, [_apply(each, **changes) for each in moved])

    def _copy(self, source: Tensor, into: Tensor, **changes: Any) -> None:
        offset = int(into.storage_offset())
        labels = self.find(source)
        if len(labels) == 0 and not self.find(into):
            return
        same = source.numel() == into.numel() and source.is_contiguous() and into.is_contiguous()
        if not same:
            # Which element goes where is not followed. All may have each label.
            labels = [replace(each, start=0, count=into.numel()) for each in labels]
        moved = [replace(each, start=each.start + offset) for each in labels]
        self._replace(into, [_apply(each, **changes) for each in moved])

    def send(self, kind: str, tensors: Sequence[Tensor], ranks: Offsets, operation: str) -> None:
        """Follow a message."""
        if not self._labels or kind != "all_reduce":
            return
        for tensor in tensors:
            self._change(tensor, ranks=ranks, operation=operation)

    def follow(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Follow an operator."""
        if not self._labels:
            return
        name = func._schema.name.split("::")[1]
        if name in ("cat", "stack"):
            self._join(args[0], out)
            return
        if name == "copy_":
            # This also clears labels, if the source has none.
            self._copy(args[1], args[0])
            return
        tensors = [each for each in tree_leaves(args[:1]) if isinstance(each, Tensor)]
        if not any(map(self.find, tensors)):
            return
        # The tensor itself is on the GPU.
        copied = isinstance(out, Tensor) and out.device.type == "cpu"
        if name == "_local_scalar_dense" or copied:
            self.read += self.find(tensors[0])
        elif name in (*_PRODUCTS, *_DIVISIONS) and isinstance(args[1], int | float):
            scale = args[1]
            if name in _DIVISIONS:
                scale = 1 / scale
            self._scale(name, tensors, scale, out)
        elif name in _COPIES:
            self._copy(tensors[0], out)

    def _scale(self, name: str, tensors: Sequence[Tensor], scale: float, out: Any) -> None:
        if not name.endswith("_"):
            self._copy(tensors[0], out, scale=scale)
            return
        for tensor in tensors:
            self._change(tensor, scale=scale)

    def _join(self, parts: Sequence[Tensor], out: Tensor) -> None:
        place = 0
        labels = []
        for part in parts:
            labels += [replace(each, start=each.start + place) for each in self.find(part)]
            place += part.numel()
        if labels:
            self._replace(out, labels)


def _find_extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of a storage that a tensor may have, and the one after the last."""
    begin = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # The last element of a view with strides is not after the product of its sizes.
    return begin, begin + 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _apply(
    label: Label,
    *,
    scale: float = 1.0,
    ranks: Offsets | None = None,
    operation: str = "",
) -> Label:
    """Return a label after a factor or a sum over ranks."""
    if scale == 0:
        return replace(label, zeroed=True)
    if ranks is not None and len(ranks) > 1:
        # A mean is a sum and a factor.
        if operation == "AVG":
            scale /= len(ranks)
        label = replace(label, sums=(*label.sums, ranks))
    return replace(label, factor=label.factor * scale)


Sent = tuple[str, Offsets, str]
"""Kind, group and operation of a message."""


class Recorder(OperatorMode):
    """Records the messages of a step, and lets `GradientFlow` see all operators."""

    def __init__(self, found: RankTypes, flow: GradientFlow, names: Mapping[str, str]) -> None:
        """Record into `found`. `names` has torch's name of each group, and the name to show."""
        super().__init__()
        self._found = found
        self._flow = flow
        self._names = names
        self._phase = STEP
        self._open: list[list[Sent]] = []
        """The messages of what is running and watched, the innermost last."""

    @contextmanager
    def enter_phase(self, name: str) -> Iterator[None]:
        """Record the messages of a pass under its name."""
        before = self._phase
        self._phase = name
        try:
            yield
        finally:
            self._phase = before

    def run_operator(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, and let `GradientFlow` see it."""
        # The fake GPU runs it. Its mode is below this one.
        out = func(*args, **kwargs)
        if func.namespace != "c10d":
            self._flow.follow(func, args, out)
        return out

    def see_collective(self, call: CollectiveCall) -> None:
        """Record what is sent."""
        group = call.group
        # Nothing is compiled here, so only DTensors send by the name of a group.
        if group is None:
            return
        # A barrier has no tensor.
        shape: tuple[int, ...] = ()
        dtype = "none"
        if call.tensors:
            shape = tuple(call.tensors[0].shape)
            dtype = name_dtype(call.tensors[0])
        # The fifth argument has the rows for each rank, if they may be uneven. Those of this rank
        # may be even by chance, such as Muon's parts of matrices.
        if call.kind == "all_to_all" and call.args[4]:
            shape = shape[1:]
        if any(map(self._flow.find, call.tensors)):
            # The last of FSDP2's shards are smaller, or empty.
            shape = ()
        name = self._names.get(call.group_name, call.group_name)
        message = Message(call.kind, name, group.size(), dtype, shape, find_line())
        self._found.phases.setdefault(self._phase, []).append(message)
        ranks = list_offsets(group)
        for messages in self._open:
            messages.append((call.kind, ranks, call.operation))
        self._flow.send(call.kind, call.tensors, ranks, call.operation)

    @contextmanager
    def watch(self) -> Iterator[list[Sent]]:
        """Yield a list that gets the messages that are sent meanwhile."""
        messages: list[Sent] = []
        self._open.append(messages)
        try:
            yield messages
        finally:
            self._open.pop()

    # -- declared Functions -----------------------------------------------------------------------

    def _watch(self, function: Any, rule: SpmdRule) -> tuple[Any, Any]:
        """Return both passes of a Function, which compare their messages with the declaration."""
        forward = function.forward
        backward = function.backward
        signature = inspect.signature(forward)

        def run(pass_: Callable[..., Any], name: str, text: str, group: Any, *args: Any) -> Any:
            with self.watch() as messages:
                out = pass_(*args)
            self._compare(f"{function.__name__}.{name}", pass_, text, group, messages)
            return out

        def run_forward(ctx: Any, *args: Any) -> Any:
            ctx.spmd_group = find_group(rule, signature.bind(ctx, *args).arguments)
            return run(forward, "forward", rule.forward, ctx.spmd_group, ctx, *args)

        def run_backward(ctx: Any, *grads: Any) -> Any:
            return run(backward, "backward", rule.backward, ctx.spmd_group, _Unpacked(ctx), *grads)

        # `inspect` then still finds the names of the arguments.
        run_forward.__signature__ = signature  # type: ignore[attr-defined]
        return staticmethod(run_forward), staticmethod(run_backward)

    def _compare(
        self,
        name: str,
        pass_: Any,
        text: str,
        group: Any,
        messages: list[Sent],
    ) -> None:
        # A group of one rank sends nothing.
        expected: list[str] = []
        ranks = list_ranks(group)
        if len(ranks) > 1:
            expected = choose_variant(text, group).split()
        kinds = [kind for kind, *_ in messages]
        if expected and expected[-1].endswith("+"):
            # Each chunk has a message.
            kinds = [f"{kind}+" for kind in dict.fromkeys(kinds)]
        self._found.checked["messages of Functions"] += 1
        # A message of another group is as wrong as a missing one.
        if kinds == expected and all(of == ranks for _, of, _ in messages):
            return
        code = inspect.unwrap(pass_).__code__
        line = f"{code.co_filename.rpartition('megatron/')[2]}:{code.co_firstlineno}"
        self._found.problems.append(
            f"{name} ({line}) sends {' and '.join(kinds) or 'nothing'}, and must send "
            f"{' and '.join(expected) or 'nothing'} in a group of {len(ranks)}"
        )

    # -- stages -----------------------------------------------------------------------------------

    def _note_transfers(self, name: str, ops: Callable[..., list[Any]], step: int) -> Any:
        """Return a function of torch's stages that records the messages it makes."""

        def make(stage: Any, microbatch: int) -> list[Any]:
            made = ops(stage, microbatch)
            # Both sides name the sender's stage, so that their lists can be compared.
            sender = stage.stage_index + step
            noted = self._found.transfers.setdefault(name, [])
            for op in made:
                shape = tuple(op.tensor.shape)
                dtype = name_dtype(op.tensor)
                noted.append(Transfer(sender // stage.group_size, microbatch, dtype, shape))
            return made

        return make

    @contextmanager
    def install(self, skip: Callable[[int], bool]) -> Iterator[None]:
        """Record meanwhile. Microbatches that `skip` names pass stages without computation."""
        compute = _StageModule.forward
        outputs: dict[int, Tensor] = {}

        def note_phase(direction: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def run_noted(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
                chunk = stage.stage_index // stage.group_size
                with self.enter_phase(f"{direction} {chunk}.{number}"):
                    return run(stage, number, *args, **kwargs)

            return run_noted

        def run_module(module: Any, x: Tensor | None = None, *, number: Tensor) -> Tensor:
            # FSDP2's hooks are hooks of the model, and do not run for a skipped microbatch.
            if skip(int(number)):
                return _pass_through(module, x, outputs[id(module)])
            out = compute(module, x, number=number)
            outputs[id(module)] = out.detach()
            return out

        transfers = (
            ("sent forward", "get_fwd_send_ops", 0),
            ("received forward", "get_fwd_recv_ops", -1),
            ("sent backward", "get_bwd_send_ops", 0),
            ("received backward", "get_bwd_recv_ops", 1),
        )
        with ExitStack() as stack:
            for direction in ("forward", "backward"):
                name = f"{direction}_one_chunk"
                run = note_phase(direction, getattr(_Stage, name))
                stack.enter_context(patch.object(_Stage, name, run))
            stack.enter_context(patch.object(_StageModule, "forward", run_module))
            for name, method, step in transfers:
                ops = self._note_transfers(name, getattr(_Stage, method), step)
                stack.enter_context(patch.object(_Stage, method, ops))
            for function, rule in DECLARED.items():
                passes = self._watch(function, rule)
                for name, pass_ in zip(("forward", "backward"), passes, strict=True):
                    stack.enter_context(patch.object(function, name, pass_))
            yield


class _Unpacked:
    """The context of a Function whose saved tensors are read before its backward pass.

    A recomputation starts when they are read. Its messages are none of the Function's.
    """

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _pass_through(module: Any, x: Tensor | None, like: Tensor) -> Tensor:
    """Return what has the shape of a stage's output, without computing the stage."""
    # The first stage has no input that a gradient could go to.
    if x is None:
        return torch.zeros_like(like, requires_grad=True)
    if not module.model.stage.last:
        return x.view_as(x)
    out = x.float().mean()
    module.losses.append(out.detach())
    return out
