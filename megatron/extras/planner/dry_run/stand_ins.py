"""Stand-ins for what a CPU build of torch lacks: torch.cuda, and the choice of attention kernels.

`install_stand_ins` changes torch for the whole process, so a dry run has a process of its own.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.attention import bias as attention_bias
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from megatron.parallel.spmd import declare

_ATEN = torch.ops.aten
_KERNELS = torch.library.Library("aten", "IMPL")
"""Operators that `install_stand_ins` adds to the CUDA device."""
_OWN_OPERATORS = torch.library.Library("dry_run", "DEF")
"""Operators that stand for fused kernels which a CPU build does not have."""
_MEMORY = 80 << 30
"""Bytes of the fake GPU. Nothing fails if more are used."""
GPU = torch.device("cuda", 0)
Wait = Callable[[str], None]
"""Called with what the host waits for."""
DEFAULT_STREAM = "default"


@dataclass(frozen=True)
class _Properties:
    """Properties of the fake GPU."""

    name: str = "fake GPU"
    total_memory: int = _MEMORY
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    L2_cache_size: int = 50 << 20
    gcnArchName: str = ""  # noqa: N815  (torch's name)
    """AMD's name of an architecture."""
    uuid: str = "GPU-0"


def _name_gpu() -> str:
    """Return the name of this rank's GPU. Ranks of one host do not share it."""
    return f"GPU-{os.environ.get('RANK', '0')}"


class FakeStream(torch.Stream):
    """A stream that orders nothing, because nothing runs on it."""

    wait_for: Wait = staticmethod(lambda cause: None)

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> "FakeStream":
        """Create a new stream of the only GPU, or the one with these ids."""
        # torch passes ids for a stream that exists already.
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=GPU, priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Order nothing."""

    def wait_event(self, event: Any) -> None:
        """Order nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event and return it."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Report that the host waits."""
        self.wait_for("stream.synchronize")

    def query(self) -> bool:
        """Return that all work is done."""
        return True


class FakeEvent:
    """An event that is over when the host has waited for the GPU since it was recorded."""

    wait_for: Wait = staticmethod(lambda cause: None)
    count_waits: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept the options of a CUDA event."""
        self._recorded_at = -1

    def record(self, stream: Any = None) -> None:
        """Remember how often the host has waited."""
        self._recorded_at = self.count_waits()

    def wait(self, stream: Any = None) -> None:
        """Order nothing."""

    def query(self) -> bool:
        """Return that the event is over."""
        return True

    def synchronize(self) -> None:
        """Report that the host waits, unless the event is over."""
        if self._recorded_at == self.count_waits():
            self.wait_for("event.synchronize")

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return a millisecond."""
        return 1.0


class FakeRuntime:
    """The functions of the CUDA runtime that pin memory of the host. They return error codes."""

    _errors: ClassVar = {
        2: "out of memory",
        712: "part or all of the requested memory range is already mapped",
        713: "pointer does not correspond to a registered memory region",
    }

    def __init__(self, note_registered: Callable[[int], None]) -> None:
        """Pin nothing so far.

        Args:
            note_registered: Called with the bytes of each range of memory that is pinned.
        """
        self._note_registered = note_registered
        self._ranges: dict[int, int] = {}
        """Address -> bytes."""

    def count_bytes(self) -> int:
        """Return the bytes of memory that are pinned now."""
        return sum(tuple(self._ranges.values()))

    def is_pinned(self, address: int) -> bool:
        """Return whether the memory at an address is pinned."""
        # A copy, because another thread may change the ranges.
        ranges = tuple(self._ranges.items())
        return any(begin <= address < begin + size for begin, size in ranges)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Pin a range of memory. No byte of it may be pinned already."""
        for begin, length in tuple(self._ranges.items()):
            if begin < address + size and address < begin + length:
                return 712
        self._ranges[address] = size
        self._note_registered(size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unpin the range of memory that begins at an address."""
        if self._ranges.pop(address, None) is None:
            return 713
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Return what an error code means."""
        return self._errors[code]


class FakeGenerator:
    """The random generator of the GPU, which has no state."""

    device = GPU

    def manual_seed(self, seed: int) -> "FakeGenerator":
        """Accept a seed."""
        return self


_read_current_stream = torch._C._accelerator_getStream


def get_current_stream(device: Any = None) -> FakeStream:
    """Return the current stream of this thread."""
    current = _read_current_stream(0)
    return FakeStream(
        stream_id=current.stream_id,
        device_index=current.device_index,
        device_type=current.device_type,
    )


@contextlib.contextmanager
def use_stream(stream: FakeStream | None) -> Iterator[None]:
    """Make a stream the current one of this thread."""
    if stream is None:
        yield
        return
    before = get_current_stream()
    torch._C._accelerator_setStream(stream)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


class FakeOrder:
    """The order of attention kernels that torch installs in the first call of a process."""

    installed: ClassVar = False
    of_torch: ClassVar = (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
        SDPBackend.OVERRIDEABLE,
    )


class FakeDevice(contextlib.nullcontext[None]):
    """The context of a device, which changes nothing because there is one GPU.

    It is a class, because torch asks whether a device is an instance of it.
    """


def install_stand_ins(
    wait_for: Wait,
    count_waits: Callable[[], int],
    note_storage: Callable[[torch.UntypedStorage], None],
    runtime: FakeRuntime,
) -> None:
    """Let this process use fake CUDA tensors. Call it once.

    Args:
        wait_for: Called when the host waits for the GPU.
        count_waits: Returns how often the host has waited.
        note_storage: Called with a storage after it was resized.
        runtime: What `torch.cuda.cudart` returns.
    """
    FakeStream.wait_for = staticmethod(wait_for)
    FakeEvent.wait_for = staticmethod(wait_for)
    FakeEvent.count_waits = staticmethod(count_waits)
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        # One GPU, because the device guard has one. So every rank of a host has number 0.
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": FakeDevice,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_name": lambda device=None: _Properties.name,
        # torch's compiler keeps a reference to the public function, which calls this one.
        "_get_device_properties": lambda device=None: _Properties(uuid=_name_gpu()),
        "get_device_capability": lambda device=None: (_Properties.major, _Properties.minor),
        "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: wait_for("cuda.synchronize"),
        "cudart": lambda: runtime,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": use_stream,
        "current_stream": get_current_stream,
        "default_stream": lambda device=None: FakeStream(
            stream_id=0, device_index=0, device_type=1
        ),
        "default_generators": (FakeGenerator(),),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    # FSDP2 lets this stream wait for events of another one, with ZeRO 3 and a pipeline. torch's own
    # stream would read the memory of a `FakeEvent` as that of an event. torch.compile knows the
    # functions of torch that call this one, so they stay.
    torch._C._accelerator_getStream = get_current_stream  # type: ignore[assignment]
    # DeepSpeed marks its phases for a profiler.
    torch.cuda.nvtx.range_push = lambda message: 0
    torch.cuda.nvtx.range_pop = lambda: 0
    # torch would allocate a real tensor on the first use of a device.
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    # `torch.tensor(..., device="cuda")` then makes a CPU tensor and copies it, as on a real GPU.
    avoided = property(lambda mode: True)
    FakeTensorMode.avoid_device_init = avoided  # type: ignore[assignment, method-assign]
    torch._C._set_only_lift_cpu_tensors(True)
    _replace_resize(note_storage)
    _replace_tolist()
    _replace_nccl()
    _replace_attention()
    _replace_rms_norm()
    _keep_silu_fused()
    _skip_pipeline_vote()
    _replace_conversion()
    _replace_kernels()


def _replace_resize(note_storage: Callable[[torch.UntypedStorage], None]) -> None:
    """Report resized storages. FSDP2 frees and allocates gathered weights in this way."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note_storage(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]


def _replace_tolist() -> None:
    """Let `tolist` of a fake tensor copy it once, as a real GPU tensor does.

    torch's own version would read each element by itself.
    """

    # One copy to the host makes a real tensor there.
    def copy_to_list(tensor: Tensor) -> Any:
        return tensor.cpu().tolist()

    FakeTensor.tolist = copy_to_list  # type: ignore[assignment, method-assign]


def _replace_nccl() -> None:
    """Let the fake process group take the place of NCCL, which a CPU build lacks."""
    # The backend is replaced where the group starts, so the code above still chooses NCCL.
    join = dist.init_process_group

    def join_fake(backend: str | None = None, *args: Any, **options: Any) -> None:
        join("fake" if backend == "nccl" else backend, *args, **options)

    dist.init_process_group = join_fake


def _replace_attention() -> None:
    """Choose the attention kernel that a CUDA build would choose.

    A CPU build takes the kernel without fusion for every other device.
    """
    attend = functional.scaled_dot_product_attention

    def choose(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: "Tensor | _LastQueries | None" = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        half = query.dtype in (torch.float16, torch.bfloat16)
        by_position = isinstance(attn_mask, _LastQueries)
        if query.device.type != "cuda":
            kernel = "MATH"
        else:
            kernel = _choose_kernel(
                {
                    # These two kernels take grouped queries as they are. The first one does not
                    # take values of another width than keys.
                    "FLASH_ATTENTION": half
                    and (attn_mask is None or by_position)
                    and value.shape[3] == key.shape[3],
                    # It refuses a single key.
                    "CUDNN_ATTENTION": half and not by_position and key.shape[2] > 1,
                    "EFFICIENT_ATTENTION": not enable_gqa,
                    # Without fusion, everything is possible.
                    "MATH": True,
                }
            )
        # Fused kernels compute the last queries of a causal product without a mask in memory.
        if isinstance(attn_mask, _LastQueries):
            is_causal = kernel != "MATH"
            attn_mask = None if is_causal else attn_mask.make_mask(query.device)
        # The kernels read a bias for each sample and head. Expanding it needs no memory.
        bias = attn_mask
        if bias is not None and query.device.type == "cuda":
            bias = bias.expand(query.shape[0], query.shape[1], -1, -1)
        if kernel == "FLASH_ATTENTION":
            return _ATEN._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == "CUDNN_ATTENTION":
            return _ATEN._scaled_dot_product_cudnn_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == "EFFICIENT_ATTENTION":
            return _ATEN._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    functional.scaled_dot_product_attention = choose
    attention_bias.causal_lower_right = _LastQueries  # type: ignore[assignment]


class _LastQueries:
    """What `causal_lower_right` returns. torch's own tensor cannot be made in fake mode."""

    def __init__(self, queries: int, keys: int) -> None:
        self._queries = queries
        self._keys = keys

    def make_mask(self, device: torch.device) -> Tensor:
        """Return the mask of the kernel without fusion, bool[queries, keys]."""
        mask = torch.ones((self._queries, self._keys), dtype=torch.bool, device=device)
        return mask.tril(self._keys - self._queries)


def _choose_kernel(possible: dict[str, bool]) -> str:
    """Return the first possible kernel, in the order that `sdpa_kernel` has set, if it has.

    Raises:
        RuntimeError: `sdpa_kernel` allows none of the possible kernels, as torch raises it.
    """
    allowed = _list_allowed_kernels()
    # `sdpa_kernel` turns off all kernels that it is not given, and nobody gives this one.
    if "OVERRIDEABLE" in allowed:
        # torch's own choice. Some versions and GPUs prefer cuDNN, which is not shown here.
        allowed = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    for kernel in allowed:
        if possible.get(kernel, False):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


# torch's compiler can trace neither the call that returns the order nor the members of the enum.
@torch.compiler.assume_constant_result
def _list_allowed_kernels() -> list[str]:
    """Return the names of the kernels that are allowed, the preferred one first."""
    if not FakeOrder.installed:
        # As on a real GPU, the first call replaces the order, also within `sdpa_kernel`.
        FakeOrder.installed = True
        order: list[Any] = list(FakeOrder.of_torch)
        torch._C._set_sdp_priority_order([int(kernel) for kernel in order])
    return [kernel.name for kernel in _cur_sdpa_kernel_backends(with_priority=True)]


def _normalise_shapes(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the forward kernel of RMSNorm allocates: the output, and an fp32 number a row."""
    # The backward pass reads the number. It is small, but long sequences have many rows.
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _normalise_backward_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of the weight."""
    return torch.empty_like(x), torch.empty_like(weight)


_OWN_OPERATORS.define("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)")
_OWN_OPERATORS.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)"
)
_OWN_OPERATORS.impl("rms_norm", _normalise_shapes, "Meta")
_OWN_OPERATORS.impl("rms_norm_backward", _normalise_backward_shapes, "Meta")


@declare()
class _FusedRMSNorm(torch.autograd.Function):
    """The fused kernels of a CUDA build, one operator each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, rstd = torch.ops.dry_run.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dry_run.rms_norm_backward(grads[0], *ctx.saved_tensors)


def _replace_rms_norm() -> None:
    """Let RMSNorm use memory as its fused kernel does.

    A CPU build computes it by several operators, which keep two fp32 copies of the input.
    """
    compute = functional.rms_norm

    def normalise(
        x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        # The kernel needs a weight of the input's dtype.
        if x.device.type != "cuda" or weight is None or weight.dtype != x.dtype:
            return compute(x, shape, weight, eps)
        assert x.shape[x.dim() - len(shape) :] == weight.shape, "the norm has another width"
        return _FusedRMSNorm.apply(x, weight)

    functional.rms_norm = normalise  # type: ignore[assignment]


def _keep_silu_fused() -> None:
    """Let the backward pass of SiLU be one operator, as a CUDA build has it.

    A CPU build has no kernel of it for CUDA, and would compute it by several operators that keep
    their results.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        # The fake tensors compute the shape of the result, so this kernel never runs.
        _KERNELS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")


def _skip_pipeline_vote() -> None:
    """Skip the messages by which stages agree on static shapes. All stages have them.

    The vote is read from a message, and fake messages have no values. torch 2.11 has no vote, and
    torch 2.15 has none between fake ranks.
    """
    from torch.distributed.pipelining import schedules

    if not hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        return
    from torch.distributed.pipelining._utils import InferenceMode

    def agree(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedules._PipelineSchedule._warmup_p2p = agree  # type: ignore[assignment, method-assign]


def _replace_conversion() -> None:
    """Let modules replace their parameters if they are moved or cast.

    torch would exchange the contents of two fake tensors, which fails if one has weak references.
    """

    def convert(
        module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        if recurse:
            for child in module.children():
                # FSDP2's modules have a version of their own.
                child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                result = function(parameter)
                if result is parameter:
                    continue
                if isinstance(parameter, FakeTensor) and result.device == parameter.device:
                    # The optimizer may hold the parameter already, so it must stay the same.
                    parameter.data = result
                    continue
                converted = nn.Parameter(result, parameter.requires_grad)
            converted.__dict__.update(parameter.__dict__)
            module._parameters[name] = converted
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]


def _replace_kernels() -> None:
    """Let torch.compile run the operators of a graph, because a kernel needs a real GPU."""

    def compile_graph(wrapper: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        from megatron.extras.planner.dry_run.compiler import compile_without_kernels

        return compile_without_kernels(graph, inputs)

    inductor: Any = torch._TorchCompileInductorWrapper
    inductor.__call__ = compile_graph
