"""The fake GPU: runs operators on fake CUDA tensors, and records what they would make a GPU do.

Tensors of the host stay real. An operator is fake if an argument or its result is on the GPU. What
is read from the GPU has no value, so the host gets values that let a healthy run continue: True
for a comparison, 0 for a count, and 2 for a number. 2 is larger than the usual --clip-grad, so a
step clips its gradients.

All allocations and releases are recorded in their order. A tensor may turn out to be a gradient
only after the peak, so the peak is divided by kind afterwards.
"""

import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron.extras.planner.dry_run.record import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    KINDS,
    Collective,
    HostCopy,
    Product,
    StepTrace,
    Synchronisation,
    name_line,
)
from megatron.extras.planner.dry_run.stand_ins import (
    GPU,
    FakeRuntime,
    get_current_stream,
    install_stand_ins,
)
from megatron.extras.watch.operator_mode import CollectiveCall, OperatorMode, list_tensors
from megatron.parallel import entered_linear

_FSDP = "/torch/distributed/fsdp/_fully_shard/"
_PIPELINE = "megatron/engine/pipeline_runner.py"
_DEPTH = 40
"""Number of Python frames that are searched for the cause of an allocation."""


class MemoryLog:
    """The allocations of a rank, from its start on."""

    def __init__(self) -> None:
        """Start with no memory in use."""
        self._serials: dict[int, int] = {}
        # Storage of C++ -> serial number. The serial is never used twice, as addresses are.
        self._references: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._events: list[tuple[int, int]] = []
        self._start = 0

    def note(self, tensor: Tensor) -> None:
        """Record the memory of a tensor, if it is new or was resized."""
        storage = tensor.untyped_storage()
        self.note_storage(storage)

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """Record a storage of the GPU, if it is new or was resized."""
        key = storage._cdata
        size = storage.nbytes()
        serial = self._serials.get(key)
        if serial is None:
            serial = len(self._sizes)
            self._serials[key] = serial
            # The size is added below, by the same lines as for a storage that was resized.
            self._sizes.append(0)
            self._kinds.append(_find_kind())
            self._references[key] = weakref.ref(storage, lambda _: self._release(key))
        if size != self._sizes[serial]:
            self._events.append((serial, size - self._sizes[serial]))
            self._sizes[serial] = size

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is one of the GPU's."""
        return storage._cdata in self._serials

    def label(self, tensor: Tensor | None, kind: str) -> None:
        """Set what the memory of a tensor is used for, from its allocation on."""
        if tensor is None:
            return
        serial = self._serials.get(tensor.untyped_storage()._cdata)
        if serial is not None:
            self._kinds[serial] = kind

    def _release(self, key: int) -> None:
        serial = self._serials.pop(key)
        del self._references[key]
        self._events.append((serial, -self._sizes[serial]))
        self._sizes[serial] = 0

    def start_step(self) -> None:
        """Let the peak be searched from now on."""
        self._start = len(self._events)

    def measure_kept(self) -> dict[str, int]:
        """Return the bytes that are in use now, by kind."""
        return self._divide(len(self._events))

    def measure_peak(self) -> dict[str, int]:
        """Return the bytes by kind at the event since `start_step` with most bytes in use."""
        used = sum(delta for _, delta in self._events[: self._start])
        highest = used
        at = self._start
        # Only an event that adds memory can make a new highest sum.
        for number, (_, delta) in enumerate(self._events[self._start :], self._start + 1):
            used += delta
            if used > highest:
                highest = used
                at = number
        return self._divide(at)

    def _divide(self, events: int) -> dict[str, int]:
        """Return the bytes by kind after a number of events."""
        used: Counter[str] = Counter()
        for serial, delta in self._events[:events]:
            used[self._kinds[serial]] += delta
        return {kind: used[kind] for kind in KINDS}


def _find_kind() -> str:
    """Return what memory is used for that is allocated now, from the functions that are running."""
    # The first six frames are this module and the dispatch mode.
    frame: Any = sys._getframe(6)
    for _ in range(_DEPTH):
        if frame is None:
            return ACTIVATIONS
        path = frame.f_code.co_filename
        if _FSDP in path:
            # FSDP2 keeps the gradients of earlier microbatches in fp32. Its other tensors are what
            # it sends and receives.
            if frame.f_code.co_name == "to_accumulated_grad_if_needed":
                return GRADIENTS
            # Its hooks call the modules, whose tensors are none of FSDP2's.
            if path.endswith(("_fsdp_collectives.py", "_fsdp_param.py")):
                return COMMUNICATION
        if path.endswith(_PIPELINE) and frame.f_code.co_name == "_make_buffers":
            return COMMUNICATION
        frame = frame.f_back
    return ACTIVATIONS


_ATEN = torch.ops.aten
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


Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Takes an operator, its arguments with and without a name, and its result."""


class FakeGpu(OperatorMode):
    """Runs operators on fake tensors, and records what they do. A process has one of them."""

    def __init__(self) -> None:
        """Install the stand-ins for torch.cuda. The record is empty."""
        super().__init__()
        self.memory = MemoryLog()
        self._fake = _ThreadedFakeMode(allow_non_fake_inputs=True)
        self._step = StepTrace()
        self._waits = 0
        """How often the host has waited, in all steps."""
        self._watchers: list[Watcher] = []
        self._lock = threading.RLock()
        self.groups: Mapping[str, str] = {}
        """torch's names of groups -> the names in the report."""
        self.streams: Mapping[int, str] = {}
        """Numbers of streams -> the names in the report."""
        self._pinned: dict[int, Any] = {}
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

    def count_pinned_bytes(self) -> int:
        """Return the bytes of host memory that `cudaHostRegister` has pinned now."""
        return self._runtime.count_bytes()

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Call a function after each operator that is run meanwhile, those of the host included."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def start_step(self) -> None:
        """Forget what was recorded. The memory in use stays."""
        self._step = StepTrace()
        self.memory.start_step()

    def end_step(self) -> StepTrace:
        """Return what was recorded since `start_step`."""
        peak, kept = self.memory.measure_peak(), self.memory.measure_kept()
        return replace(self._step.sort(), peak=peak, kept=kept)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator. See `OperatorMode`."""
        if torch._guards.TracingContext.try_get() is not None:
            # torch's compiler tries operators on fake tensors of its own.
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_operator(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, on fake tensors if it concerns the GPU."""
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
        """Run an operator as it is, and call the watchers."""
        out = self._compute(func, types, args, kwargs)
        for watcher in self._watchers:
            watcher(func, args, kwargs, out)
        return out

    def _compute(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operator on fake tensors, or on real ones of the host."""
        makes_gpu = _names_gpu(args, kwargs)
        if not makes_gpu and FakeTensor not in types:
            return func(*args, **kwargs)
        # A save copies the weights in a thread of its own, while the next step runs.
        with self._lock, self._fake:
            out = func(*args, **kwargs)
            self._step.operators += 1
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
            self._step.products[Product(*map(name_dtype, (*factors, out)))] += 1

    def _note_resized(self, storage: torch.UntypedStorage) -> None:
        if self.memory.knows(storage):
            self.memory.note_storage(storage)

    # -- the host and the GPU ---------------------------------------------------------------------

    def _wait(self, cause: str) -> None:
        self._step.synchronisations[Synchronisation(cause, find_line())] += 1
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
        size = source.nbytes
        direction = "to the GPU" if target.type == "cuda" else "to the host"
        self._step.copies[HostCopy(direction, size, blocking, find_line())] += 1
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
        self._step.registered[find_line()] += size

    def _is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._has_pinned(args[0])

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._mark_pinned(args[0].clone())

    # -- messages ---------------------------------------------------------------------------------

    def see_collective(self, call: CollectiveCall) -> None:
        """Record a message."""
        group = self.groups.get(call.group_name, call.group_name)
        ranks = 0
        if call.group is not None:
            ranks = call.group.size()
        elif call.group_name not in self.groups:
            group = "unknown"
        largest = max((each.nbytes for each in call.tensors), default=0)
        # This variant has its output as a list of tensors, one for each rank.
        if call.operator == "allgather_":
            largest *= ranks
        elif call.operator == "all_gather_into_tensor":
            # In a compiled graph, the output is not among the arguments. The number of ranks is.
            largest *= call.args[1]
        # NCCL runs it on a stream of its own, which waits for this one.
        number = get_current_stream().stream_id
        stream = "host"
        if any(map(_is_on_gpu, call.tensors)):
            stream = self.streams.get(number, f"stream {number}")
        dtype = "none"
        if call.tensors:
            dtype = name_dtype(call.tensors[0])
        self._step.collectives[Collective(call.kind, group, ranks, dtype, largest, stream)] += 1


def name_dtype(tensor: Tensor) -> str:
    """Return a dtype as reports have it, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


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
    answers = {getattr(each, "answer", None) for each in list_tensors(args)}
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


def find_line() -> str:
    """Return the innermost line of the step that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        line = name_line(frame.f_code.co_filename, frame.f_lineno)
        if line is not None:
            return line
        frame = frame.f_back
    return "torch"
