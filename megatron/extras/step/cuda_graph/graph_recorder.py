"""Records the kernels of a function on a GPU, and repeats them.

All graphs of a recorder take their memory from one pool. What a recorded function frees can be used
by the next recorded function, and by eager passes within `share_memory`. The next repetition
overwrites it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.base.plain_text import format_bytes

_MARGIN = 0.03
"""Share of the peak memory that two pools may lose in comparison with one."""


class RecordingError(Exception):
    """A function cannot be recorded. The message names the operator if it is known."""


class GraphRecorder(Protocol):
    """Records functions without arguments and without a result."""

    def find_shortage(self, added: int) -> str:
        """Return why the memory does not suffice for graphs, or an empty text.

        Args:
            added: Bytes that the recorded functions need in addition to the peak until now.
        """
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function, and return what repeats it. The results of `run` are not defined.

        Each repetition reads and writes the memory that `run` has read and written.

        Raises:
            RecordingError: An operator of the function cannot be recorded.
        """
        ...

    def share_memory(self) -> AbstractContextManager[None]:
        """Return a context whose tensors may lie in the memory of the graphs.

        Nothing that was made within it may be read after the next repetition.
        """
        ...


class CudaGraphRecorder:
    """A `GraphRecorder` that records CUDA graphs."""

    def __init__(
        self, device: torch.device, pause: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Create a recorder without graphs.

        Args:
            device: This rank's GPU.
            pause: Returns a context in which no collective is timed.
        """
        self._device = device
        self._pause = pause
        self._pool = torch.cuda.MemPool()
        # The allocator gives freed memory to the same stream only, so all graphs and passes that
        # share it run on one.
        self._stream = torch.cuda.Stream(device)

    def find_shortage(self, added: int) -> str:
        """Compare with the peak of the steps until now. See `GraphRecorder.find_shortage`."""
        needed = int(torch.cuda.max_memory_allocated(self._device) * (1 + _MARGIN)) + added
        free, _ = torch.cuda.mem_get_info(self._device)
        # The memory that torch has reserved belongs to this process, so graphs may use it.
        available = free + torch.cuda.memory_reserved(self._device)
        if needed <= available:
            return ""
        return f"they need {format_bytes(needed)}, and {format_bytes(available)} are available"

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a CUDA graph. See `GraphRecorder.record`."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            self._record(graph, run)
        except RuntimeError as error:
            # torch leaves its own stream current if the end of a recording fails.
            torch.cuda.set_stream(before)
            raise RecordingError(self._describe(error, run, before)) from error
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        # Threads that read data or save call CUDA too. With "thread_local" they do not end the
        # recording.
        # torch has a type of its own for the number of a pool.
        pool: Any = self._pool.id
        recording = torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with self._pause(), recording:
            run()

    def _describe(self, error: BaseException, run: Callable[[], None], before: Any) -> str:
        """Return the first error, and the operator at which another recording ends."""
        # The first error is the cause. Later ones come from the end of the recording.
        while error.__context__ is not None:
            error = error.__context__
        # The failed recording does not know its operator. Another one stops at the same place.
        operators = _LatestOperator()
        try:
            with operators:
                self._record(torch.cuda.CUDAGraph(), run)
        except RuntimeError:
            torch.cuda.set_stream(before)
        return f"{operators.name}: {str(error).splitlines()[0]}"

    @contextmanager
    def share_memory(self) -> Iterator[None]:
        """Allocate in the pool of the graphs. See `GraphRecorder.share_memory`."""
        # A backward pass allocates on threads of its own, and so not in the pool. Its tensors are
        # small in comparison with what a forward pass keeps.
        # Both streams wait for each other, because they read the same weights and gradients.
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            yield
        before.wait_stream(self._stream)


class _LatestOperator(TorchDispatchMode):
    """Remembers the operator of torch that was called last."""

    name = "an unknown operator"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))
