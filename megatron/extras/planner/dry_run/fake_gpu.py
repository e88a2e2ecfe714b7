"""The fake GPU: runs operators on fake CUDA tensors, and records what they would make a GPU do.

Tensors of the host stay real. An operator is fake if an argument or its result is on the GPU. What
is read from the GPU has no value, so the host gets values that let a healthy run continue: True
for a comparison, 0 for a count, and 2 for a number. 2 is larger than the usual --clip-grad, so a
step clips its gradients.
"""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.base.code_version import PACKAGE
from megatron.extras.planner.dry_run.memory import MemoryLog
from megatron.extras.planner.dry_run.record import (
    Collective,
    HostCopy,
    Product,
    StepTrace,
    Synchronisation,
)
from megatron.extras.planner.dry_run.stand_ins import (
    GPU,
    FakeRuntime,
    get_current_stream,
    install_stand_ins,
)
from megatron.parallel import entered_linear

_ATEN = torch.ops.aten
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
"""torch's name -> the name in the report."""
_KEEP_ANSWER = {
    _ATEN.logical_or.default,
    _ATEN.bitwise_or.Tensor,
    _ATEN.mul.Tensor,
    _ATEN.all.default,
    _ATEN.any.default,
    _ATEN.max.default,
    _ATEN.stack.default,
    _ATEN._to_copy.default,
}
"""Operators whose result is true if all arguments are, and false if none is."""
_OWN_OPERATORS: dict[Any, Callable[..., Any]] = {
    torch.ops.megatron.padded_linears.default: entered_linear.run_forward,
    torch.ops.megatron.padded_linears_backward.default: entered_linear.run_backward,
}
"""Operators of compiled graphs that consist of several of torch's."""
_FACTORS = {"mm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1}
"""Operator that multiplies two matrices -> the number of its argument that is the first one."""
_PACKAGE = f"{PACKAGE}/"
_OWN = str(Path(__file__).parents[1]) + "/"
_FILL = {torch.bool: 1, torch.float32: 2, torch.float64: 2, torch.float16: 2, torch.bfloat16: 2}
"""Type -> the value that the host reads from the GPU. It is 0 for all others."""


class _ThreadedFakeMode(FakeTensorMode):
    """A mode of fake tensors that several threads can use.

    While an operator runs, torch's mode reports the device of all fake tensors as `meta`. It would
    do so in all threads. A save reads the devices of weights while the training runs operators.
    """

    _thread = threading.local()

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether an operator runs in this thread."""
        return getattr(self._thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._thread.in_kernel = value


class FakeGpu(TorchDispatchMode):
    """Runs operators on fake tensors, and records what they do. A process has one of them."""

    def __init__(self) -> None:
        """Install the stand-ins for torch.cuda. The record is empty."""
        super().__init__()
        self.memory = MemoryLog()
        self._fake = _ThreadedFakeMode(allow_non_fake_inputs=True)
        self._collectives: Counter[Collective] = Counter()
        self._synchronisations: Counter[Synchronisation] = Counter()
        self._waits = 0
        """How often the host has waited, in all steps."""
        self._copies: Counter[HostCopy] = Counter()
        self._operators = 0
        self._products: Counter[Product] = Counter()
        self._lock = threading.RLock()
        self._groups: dict[str, str] = {}
        self._streams: dict[int, str] = {}
        self._pinned: dict[int, Any] = {}
        self._registered: Counter[str] = Counter()
        self._runtime = FakeRuntime(self._note_registered)
        # Operators that read from the GPU, copy between both, or need a real GPU.
        self._handlers: dict[Any, Callable[..., Any]] = {
            _ATEN._local_scalar_dense.default: self._read_number,
            _ATEN.equal.default: self._compare,
            _ATEN.nonzero.default: self._find_nonzero,
            _ATEN._to_copy.default: self._convert,
            _ATEN.copy_.default: self._copy,
            _ATEN.record_stream.default: lambda func, args, kwargs: None,
            _ATEN.is_pinned.default: self._is_pinned,
            _ATEN._pin_memory.default: self._pin,
        }
        install_stand_ins(self._wait, lambda: self._waits, self._note_resized, self._runtime)
        self._enter_in_threads()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because torch.compile would otherwise compile nothing."""
        return True

    def _enter_in_threads(self) -> None:
        """Let each thread of this process use the fake GPU. A mode is active in one thread only."""
        run = threading.Thread.run

        def run_on_gpu(thread: threading.Thread) -> None:
            with self:
                run(thread)

        threading.Thread.run = run_on_gpu  # type: ignore[assignment, method-assign]

    def forget_memory(self) -> None:
        """Start with an empty memory, although Python may still hold tensors of an earlier rank."""
        self.memory = MemoryLog()

    def name_groups(self, names: Mapping[str, str]) -> None:
        """Set the names in the report of torch's group names."""
        self._groups = dict(names)

    def name_streams(self, names: Mapping[int, str]) -> None:
        """Set the names in the report of streams."""
        self._streams = dict(names)

    def count_pinned_bytes(self) -> int:
        """Return the bytes of host memory that `cudaHostRegister` has pinned now."""
        return self._runtime.count_bytes()

    def start_step(self) -> None:
        """Forget what was recorded. The memory in use stays."""
        self._collectives.clear()
        self._synchronisations.clear()
        self._copies.clear()
        self._registered.clear()
        self._products.clear()
        self._operators = 0
        self.memory.start_step()

    def end_step(self) -> StepTrace:
        """Return what was recorded since `start_step`."""
        return StepTrace(
            dict(sorted(self._collectives.items())),
            dict(sorted(self._synchronisations.items())),
            dict(sorted(self._copies.items())),
            self.memory.measure_peak(),
            self.memory.measure_kept(),
            self._operators,
            dict(sorted(self._products.items())),
            dict(sorted(self._registered.items())),
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, on fake tensors if it concerns the GPU."""
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get() is not None:
            # torch's compiler tries operators on fake tensors of its own.
            return func(*args, **kwargs)
        if any(issubclass(each, DTensor) for each in types):
            # DTensor calls the operators of its local tensors, which come here by themselves.
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(func, args)
        operator = _OWN_OPERATORS.get(func)
        if operator is not None:
            # Its products and messages come here one by one.
            with self:
                return operator(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if kwargs.get("pin_memory"):
            # A CPU build cannot pin memory, so ordinary memory is marked as pinned.
            return self._mark_pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return self._run(func, types, args, kwargs)

    def _run(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator as it is: on fake tensors, or on real ones of the host."""
        makes_gpu = _names_gpu(args, kwargs)
        if not makes_gpu and FakeTensor not in types:
            return func(*args, **kwargs)
        # A save copies the weights in a thread of its own, while the next step runs.
        with self._lock, self._fake:
            out = func(*args, **kwargs)
            self._operators += 1
            self._note(out)
            self._note_product(func, args, out)
        # The answer is an attribute of the result, until the host reads it.
        answer = _find_answer(func, args)
        if answer is not None:
            out.answer = answer
        return out

    def _note(self, value: Any) -> None:
        """Record the memory of the results of an operator."""
        if isinstance(value, FakeTensor):
            if value.device.type == "cuda":
                self.memory.note(value)
        elif isinstance(value, list | tuple):
            for each in value:
                self._note(each)

    def _note_product(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        first = _FACTORS.get(func.__name__.partition(".")[0])
        if first is not None:
            factors = args[first : first + 2]
            names = (str(each.dtype).removeprefix("torch.") for each in (*factors, out))
            self._products[Product(*names)] += 1

    def _note_resized(self, storage: torch.UntypedStorage) -> None:
        if self.memory.knows(storage):
            self.memory.note_storage(storage)

    # -- the host and the GPU ---------------------------------------------------------------------

    def _wait(self, cause: str) -> None:
        self._synchronisations[Synchronisation(cause, find_line())] += 1
        self._waits += 1

    def _read_number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a tensor with one element."""
        tensor = args[0]
        if not _is_on_gpu(tensor):
            return func(*args, **kwargs)
        # `item`, `float`, `bool` and a branch on a tensor all come here.
        self._wait("a number is read")
        answer = getattr(tensor, "answer", None)
        if answer is not None:
            return torch.full((), answer, dtype=tensor.dtype).item()
        return torch.full((), _FILL.get(tensor.dtype, 0), dtype=tensor.dtype).item()

    def _compare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return that two tensors are equal."""
        if not any(map(_is_on_gpu, args)):
            return func(*args, **kwargs)
        assert args[0].shape == args[1].shape, "tensors of two shapes are compared"
        self._wait("torch.equal")
        return True

    def _find_nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the positions of all elements, the largest result that there may be."""
        tensor = args[0]
        if not _is_on_gpu(tensor):
            return func(*args, **kwargs)
        # The host must know the size of the result before it can go on.
        self._wait("nonzero")
        shape = (tensor.numel(), tensor.dim())
        factory = _ATEN.empty.memory_format
        return self._run(factory, (), (shape,), {"dtype": torch.int64, "device": tensor.device})

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Convert the dtype of a tensor, or copy it to another device."""
        source = args[0]
        target = torch.device(kwargs.get("device") or source.device)
        if target.type == source.device.type or "cuda" not in (target.type, source.device.type):
            return self._run(func, (type(source),), args, kwargs)
        # From here on, exactly one side is on the GPU.
        self._record_copy(source, target, bool(kwargs.get("non_blocking")))
        if target.type == "cuda":
            return self._run(func, (FakeTensor,), args, kwargs)
        dtype = kwargs.get("dtype") or source.dtype
        # A real tensor of the host, so that the host can go on with real values.
        return torch.full(source.shape, _FILL.get(dtype, 0), dtype=dtype)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy a tensor into another one."""
        into, source = args[:2]
        if not _is_on_gpu(into) and not _is_on_gpu(source):
            return self._run(func, (type(into), type(source)), args, kwargs)
        if into.device.type == source.device.type:
            return self._run(func, (FakeTensor,), args, kwargs)
        blocking = not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
        # Only the memory of the host can be pinned.
        host = source if _is_on_gpu(into) else into
        self._record_copy(source, into.device, not blocking, pinned=self._has_pinned(host))
        assert torch.broadcast_shapes(into.shape, source.shape) == into.shape, "shapes differ"
        if not _is_on_gpu(into) and into.device.type == "cpu":
            into.fill_(_FILL.get(into.dtype, 0))
        return into

    def _record_copy(
        self,
        source: Tensor,
        target: torch.device,
        asynchronous: bool,
        pinned: bool | None = None,
    ) -> None:
        """Record a copy between the host and the GPU."""
        # torch does not copy an empty tensor, so the host does not wait.
        if "meta" in (source.device.type, target.type) or source.numel() == 0:
            return
        if pinned is None:
            # The host memory of a copy from the GPU is allocated by the copy, and is not pinned.
            pinned = target.type == "cuda" and self._has_pinned(source)
        # CUDA stages a copy from memory that is not pinned, whatever the caller asks for.
        blocking = not (asynchronous and pinned)
        size = source.numel() * source.element_size()
        direction = "to the GPU" if target.type == "cuda" else "to the host"
        self._copies[HostCopy(direction, size, blocking, find_line())] += 1
        if blocking:
            self._wait(f"blocking copy {direction}")

    def _mark_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The reference keeps the address from being used again for memory that is not pinned.
        self._pinned[storage._cdata] = storage
        return tensor

    def _has_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        allocated_as_pinned = tensor.untyped_storage()._cdata in self._pinned
        return allocated_as_pinned or self._runtime.is_pinned(tensor.data_ptr())

    def _note_registered(self, size: int) -> None:
        self._registered[find_line()] += size

    def _is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._has_pinned(args[0])

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._mark_pinned(args[0].clone())

    # -- messages ---------------------------------------------------------------------------------

    def _record_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record a message, if it is one. Other operators of the namespace only wait."""
        name = func._schema.name.split("::")[1]
        kind = COLLECTIVES.get(name)
        if kind is None:
            return
        tensors = list(_list_tensors(args))
        group, ranks = self._name_group(args)
        largest = max(map(_count_bytes, tensors), default=0)
        # This variant has its output as a list of tensors, one for each rank.
        if name == "allgather_":
            largest *= ranks
        elif name == "all_gather_into_tensor":
            # In a compiled graph, the output is not among the arguments. The number of ranks is.
            largest *= args[1]
        # NCCL runs it on a stream of its own, which waits for this one.
        stream = get_current_stream().stream_id
        on_gpu = any(map(_is_on_gpu, tensors))
        self._collectives[
            Collective(
                kind,
                group,
                ranks,
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
                largest,
                self._streams.get(stream, f"stream {stream}") if on_gpu else "host",
            )
        ] += 1

    def _name_group(self, args: tuple[Any, ...]) -> tuple[str, int]:
        """Return the name and the size of the group of a message."""
        for each in args:
            # Operators of c10d get the group as an object, functional collectives by its name.
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                group = dist.ProcessGroup.unbox(each)
                return self._groups.get(group.group_name, group.group_name), group.size()
            if isinstance(each, str) and each in self._groups:
                return self._groups[each], 0
        return "unknown", 0


def _find_answer(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return what a healthy run computes, if an operator asks for infinities, nan or a sign.

    It is the answer for all elements. None: the operator asks for something else.
    """
    # torch computes `isinf` and `isfinite` by the two comparisons with infinity.
    if func is _ATEN.isnan.default or (func is _ATEN.eq.Scalar and args[1] == math.inf):
        return False
    if func is _ATEN.ne.Scalar and args[1] == math.inf:
        return True
    if func is _ATEN.eq.Tensor and args[0] is args[1]:
        return True
    # DeepSpeed asks whether a norm is negative.
    if func is _ATEN.lt.Scalar and args[1] == 0:
        return False
    if func is _ATEN.bitwise_not.default:
        answer = getattr(args[0], "answer", None)
        return None if answer is None else not answer
    if func not in _KEEP_ANSWER:
        return None
    answers = {getattr(each, "answer", None) for each in _list_tensors(args)}
    return answers.pop() if len(answers) == 1 else None


def _names_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of an operator name the GPU, as those of factories do.

    Raises:
        RuntimeError: The GPU has a number that does not exist, as CUDA raises it.
    """
    device = kwargs.get("device")
    if device is None:
        # torch's compiler gives it without its name.
        device = next((each for each in args if isinstance(each, torch.device)), None)
    if device is None:
        return False
    device = torch.device(device)
    if device.type == "cuda" and device.index not in (None, GPU.index):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {device} of one GPU")
    return device.type == "cuda"


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == "cuda"


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _list_tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _list_tensors(each)


def find_line() -> str:
    """Return the innermost line of this project that is running, without the planner itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(_OWN):
            return f"{path.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
