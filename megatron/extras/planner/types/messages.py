"""The messages of a rank: recorded in order, and compared with what the core declares."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

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
from megatron.extras.planner.types.gradients import GradientFlow
from megatron.extras.watch.operator_mode import CollectiveCall, OperatorMode
from megatron.parallel.spmd import DECLARED, SpmdRule

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
        operation = call.operation
        for messages in self._open:
            messages.append((call.kind, ranks, operation))
        self._flow.send(call.kind, call.tensors, ranks, operation)

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
        self._found.checked["messages of Functions"] = (
            self._found.checked.get("messages of Functions", 0) + 1
        )
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
        forward = _Stage.forward_one_chunk
        backward = _Stage.backward_one_chunk
        compute = _StageModule.forward
        outputs: dict[int, Tensor] = {}

        def run_forward(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            with self.enter_phase(f"forward {stage.stage_index // stage.group_size}.{number}"):
                return forward(stage, number, *args, **kwargs)

        def run_backward(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            with self.enter_phase(f"backward {stage.stage_index // stage.group_size}.{number}"):
                return backward(stage, number, *args, **kwargs)

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
            stack.enter_context(patch.object(_Stage, "forward_one_chunk", run_forward))
            stack.enter_context(patch.object(_Stage, "backward_one_chunk", run_backward))
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
