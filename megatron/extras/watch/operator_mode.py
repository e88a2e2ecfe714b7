"""A mode in which each operator of a process, and what it sends to other ranks, is seen.

The dry run, the check of types and replay record a step by it. All that ranks send goes through
torch's namespaces c10d and _c10d_functional, also the messages of FSDP2 and of a pipeline.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "barrier": ("barrier", 0),
}
"""torch's name -> the name here, and the number of the argument with this rank's input."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective or a message between two ranks, before this rank starts it."""

    operator: str
    """torch's name, such as `allreduce_`."""
    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, broadcast, reduce, send,
    receive or barrier."""
    args: tuple[Any, ...]
    """The arguments of torch's operator."""
    group: dist.ProcessGroup | None
    """None in a compiled graph, whose operators have the name of the group only."""
    group_name: str
    tensors: tuple[Tensor, ...]
    """All tensors of the call: inputs, outputs or both."""
    sent: tuple[Tensor, ...]
    """Those that carry numbers of this rank."""

    @property
    def peer(self) -> int:
        """The other rank of a message, or the first one of a broadcast, as a number in the group.

        In a send and a receive it is the argument after the group.
        """
        return int(self.args[2])

    @property
    def operation(self) -> str:
        """The operation of a reduction, such as SUM. Empty for other calls."""
        for each in self.args:
            if isinstance(each, torch.ScriptObject) and "ReduceOp" in str(each._type()):
                # torch has the number of the operation here, and not the object.
                number = each.op()  # type: ignore[attr-defined]
                return str(dist.ReduceOp.RedOpType(number)).rpartition(".")[2]
        return ""


def read_collective(func: Any, args: tuple[Any, ...]) -> CollectiveCall | None:
    """Return what an operator sends. None for operators that send nothing."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    operator = func._schema.name.split("::")[1]
    # Other operators of these namespaces only wait.
    if operator not in COLLECTIVES:
        return None
    kind, number = COLLECTIVES[operator]
    group = None
    group_name = ""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            group = dist.ProcessGroup.unbox(each)
            group_name = group.group_name
        elif isinstance(each, str):
            # It comes after the name of an operation.
            group_name = each
    sent = tuple(list_tensors(args[number]))
    if kind == "receive":
        sent = ()
    if operator == "broadcast_" and group is not None and args[2] != group.rank():
        # The message fills the tensor.
        sent = ()
    tensors = tuple(list_tensors(args))
    return CollectiveCall(operator, kind, args, group, group_name, tensors, sent)


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_tensors(each)


class OperatorMode(TorchDispatchMode):
    """Runs each operator. A subclass sees it before and after.

    torch compiles nothing within such a mode, so compiled blocks run uncompiled.
    """

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator. Report it first if it is a collective."""
        if any(issubclass(each, DTensor) for each in types):
            # DTensor calls the operators of its local tensors, which come here by themselves.
            return NotImplemented
        call = read_collective(func, args)
        if call is not None:
            self.see_collective(call)
        return self.run_operator(func, types, args, kwargs or {})

    def see_collective(self, call: CollectiveCall) -> None:
        """Do nothing. A subclass records the call, before it is started."""

    def run_operator(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operator. A subclass may look at it, or compute another one."""
        return func(*args, **kwargs)
