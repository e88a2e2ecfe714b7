"""Everything that the core uses of torch without a promise that the next version still has it.

Other modules of the core use only public names of torch, and take the rest from here. A name that
the installed version does not have is reported at the import of the module that needs it.

torch says of no function of `torch._foreach_*` that it is public, but the optimizers of torch
consist of them. `torch.distributed._functional_collectives` are collectives that the compiler can
trace.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C import _distributed_c10d

from megatron.base.errors import ConfigError

TESTED = "2.11 to 2.15"
"""The versions of torch with which the tests have passed, see docs/tests.md."""


def find(owner: object, *names: str) -> Any:
    """Return the first of several attributes that an object of torch has.

    Args:
        owner: A module, class or object.
        names: The names of the attribute, one for each version that renamed it.

    Raises:
        ConfigError: It has none of them.
    """
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    where = getattr(owner, "__name__", type(owner).__qualname__)
    raise ConfigError(
        f"torch {torch.__version__} has no {' or '.join(names)} in {where}. This package needs it, "
        f"and is tested with torch {TESTED}. Install one of these versions"
    )


# Each of them works on lists of tensors with few kernels.
Foreach = Callable[..., Any]
foreach_add_: Foreach = find(torch, "_foreach_add_")
foreach_addcmul_: Foreach = find(torch, "_foreach_addcmul_")
foreach_copy_: Foreach = find(torch, "_foreach_copy_")
foreach_div: Foreach = find(torch, "_foreach_div")
foreach_div_: Foreach = find(torch, "_foreach_div_")
foreach_lerp_: Foreach = find(torch, "_foreach_lerp_")
foreach_mul_: Foreach = find(torch, "_foreach_mul_")
foreach_norm: Foreach = find(torch, "_foreach_norm")
foreach_sqrt: Foreach = find(torch, "_foreach_sqrt")
fused_adamw_: Foreach = find(torch, "_fused_adamw_")

# torch 2.13 renamed two of these functions and logs a warning if the old names are used.
_all_gather: Callable[..., Tensor] = find(functional, "all_gather_single", "all_gather_tensor")
_reduce_scatter: Callable[..., Tensor] = find(
    functional, "reduce_scatter_single", "reduce_scatter_tensor"
)
_all_reduce: Callable[..., Tensor] = find(functional, "all_reduce")
_wait: Callable[[Tensor], Tensor] = find(functional, "wait_tensor")


def all_gather_in_graph(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in a compiled graph."""
    return _wait(_all_gather(x, 0, group))


def reduce_scatter_in_graph(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the ranks' sum along the first dimension, in a compiled graph."""
    return _wait(_reduce_scatter(x, "sum", 0, group))


def all_reduce_in_graph(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' sum as a new tensor, in a compiled graph."""
    return _wait(_all_reduce(x, "sum", group))


def make_priority_options(time_out: timedelta) -> Any:
    """Return options of an NCCL group whose messages start before computation that is queued."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # torch warns if it differs from the time-out that the group is given.
    options._timeout = time_out
    return options


def find_fsdp_collectives() -> tuple[type, type]:
    """Return FSDP2's all-gather and reduce-scatter. Only runs with several ranks import them."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives

    return find(collectives, "DefaultAllGather"), find(collectives, "DefaultReduceScatter")


def find_compilation_error() -> type[Exception]:
    """Return the base class of what a failed compilation raises. Few runs need this import."""
    import torch._dynamo.exc

    error: type[Exception] = find(torch._dynamo.exc, "TorchDynamoException")
    return error


def find_varlen_operator() -> Any:
    """Return the operator of --use-varlen-attention. Few runs need this import."""
    import torch.nn.attention.varlen

    return find(find(torch.ops.torch_attn, "_varlen_attn"), "default")


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, the oldest first.

    There are none without TORCH_FR_BUFFER_SIZE, or if torch has no such recorder. On gloo, each
    entry stays "scheduled", also after its collective has finished.
    """
    entries: list[dict[str, Any]] = []
    # NCCL has a recorder of its own.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


class StageInternals:
    """What a stage uses of torch's stage internally. `PipelineStage` is the next base class.

    torch's receive buffers are on the meta device, where they have shapes and no memory. Before
    version 2.15 torch makes all of them in `_prepare_forward_infra` and `_prepare_backward_infra`,
    later each one when its receive is asked for.
    """

    device: torch.device
    args_recv_info: dict[int, Any]
    """Microbatch -> where its activations are received."""
    grad_recv_info: dict[int, Any]
    """Microbatch -> where its gradients are received."""

    def __init_subclass__(cls) -> None:
        """Check that torch still calls what is replaced here.

        Raises:
            ConfigError: It does not have a method any more.
        """
        super().__init_subclass__()
        # Without the check, torch would call its own new methods and allocate all buffers.
        torch_class = cls.__mro__[cls.__mro__.index(StageInternals) + 1]
        find(torch_class, "_prepare_forward_infra")
        find(torch_class, "_prepare_backward_infra")

    def check_internals(self) -> None:
        """Check what torch's stage has only after its construction.

        Raises:
            ConfigError: It does not have an attribute any more.
        """
        for name in ("device", "args_recv_info", "grad_recv_info"):
            find(self, name)
        self._find_cache()

    def _find_cache(self) -> dict[int, Any]:
        # Version 2.15 of torch renamed it.
        cache: dict[int, Any] = find(self, "fwd_cache", "_forward_chunk_states")
        return cache

    def forget_microbatch(self, microbatch: int) -> None:
        """Drop the input and the output of a microbatch that has no backward pass."""
        self._find_cache().pop(microbatch)

    @contextmanager
    def on_meta_device(self) -> Iterator[None]:
        """Let torch make its tensors on the meta device."""
        device = self.device
        self.device = torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no messages, because `build_mesh` has connected the ranks.

        torch 2.11 calls this method, and torch 2.13 does not.
        """
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self.on_meta_device():
            return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self.on_meta_device():
            return super()._prepare_backward_infra(*args, **kwargs)  # type: ignore[misc]


def make_operator(
    name: str, make_results: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes `torch.ops.megatron.<name>` from a function without effects.

    `torch.library.custom_op` makes the same operator. A call of that one checks each time whether
    results share memory with arguments, and runs 60 more functions of Python. A training step calls
    such operators hundreds of times, so the checks are left to the tests. A result must not be an
    argument or a view of one. `torch.library.register_autograd` adds a gradient.

    Args:
        name: The name of the operator.
        make_results: Takes the same arguments, and returns memory for the results. It stands for
            the operator if tensors are fake. None: `torch.library.register_fake` adds it.
    """

    def register(run: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(run, mutates_args=())
        # `custom_op` gives its operators the same tag.
        torch.library.define(f"megatron::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"megatron::{name}", "default", run)
        if make_results is not None:
            torch.library.register_fake(f"megatron::{name}", make_results)
        return getattr(torch.ops.megatron, name).default

    return register
