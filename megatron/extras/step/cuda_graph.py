"""Forward and backward passes of microbatches as CUDA graphs, for --cuda-graph.

`CapturedRunner` records the passes of a microbatch once, and repeats them. `CudaGraphRecorder`
records on a GPU. `extras/step/engines.py` adds both to an engine.

There are two graphs. That of the first microbatch of a step writes the gradients, and that of the
others adds to them. What may differ between two microbatches is copied into fixed memory first: the
inputs and the factor on the loss. Everything else that a graph reads has to keep its memory: the
parameters, their gradients and the tables of positions.

The invariant: all numbers equal those of the eager runner, bit for bit.

Passes that hooks watch, and all evaluations, are eager, because a graph calls no hooks. They leave
their gradients in the memory that the graphs write.

All graphs of a recorder take their memory from one pool. What a recorded function frees can be used
by the next recorded function, and by eager passes within `share_memory`. The next repetition
overwrites it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from megatron.base.plain_text import format_bytes
from megatron.engine.native import NativeEngine
from megatron.engine.runner import SingleStageRunner
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import Mesh
from megatron.parallel.rank_progress import Phase
from megatron.parallel.torch_private import foreach_copy_
from megatron.plan.kernel_choice import runs_eager_passes
from megatron.plan.run_plan import Plan
from megatron.schedule.curriculum import Curriculum

_LENGTHS = 8
"""The number of sequence lengths of a curriculum that get graphs."""
_TENSORS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "loss_divisor",
    "dropout_key",
)
"""The fields of `Inputs` that are copied into fixed memory."""
_FIXED = ("documents", "likelihoods")
"""The fields that must be None. A graph does not read the others, which have Python numbers."""
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


class CapturedRunner:
    """A `Runner` of one stage without FSDP2. See the module."""

    def __init__(
        self,
        eager: SingleStageRunner,
        model: GPT,
        recorder: GraphRecorder,
        *,
        shortest: int,
        has_eager_steps: bool,
        log: Callable[[str], None],
    ) -> None:
        """Create a runner without graphs.

        Args:
            eager: Computes what is not repeated.
            model: The complete model, whose parameters keep their memory.
            recorder: Records the graphs.
            shortest: Samples with fewer tokens have no graphs.
            has_eager_steps: Whether some steps run eagerly beside the graphs.
            log: Prints a line on rank 0.
        """
        self._eager = eager
        self._model = model
        self._recorder = recorder
        self._shortest = shortest
        self._log = log
        self._parameters = list(model.parameters())
        self._linears = [each for each in model.modules() if hasattr(each, "products")]
        # Hooks that exist now are part of each step. Later ones belong to single steps.
        self._hooks = self._count_hooks()
        self._is_paused = False
        self._given_up = False
        self._needs_gradients = has_eager_steps
        """Whether a pass beside all gradients needs memory that no step has used yet."""
        self._warm: Any = None
        """What `_describe` returned for the latest step that prepares a recording, and whether
        it had several microbatches."""
        self._graphs: _Graphs | None = None

    @property
    def has_graphs(self) -> bool:
        """Whether the next step without hooks repeats graphs, if its sizes stay the same."""
        return self._graphs is not None

    def spoil_gradients(self) -> None:
        """Fill the memory of the gradients with nan, which the next step must overwrite."""
        if self._graphs is not None:
            for gradient in self._graphs.gradients:
                if gradient is not None:
                    gradient.fill_(torch.nan)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run microbatches eagerly within this context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def run(self, inputs: Sequence[Inputs], factor: float | Tensor, *, train: bool) -> Tensor:
        """Run the microbatches one after the other. See `Runner.run`."""
        # An evaluation has other sizes than a step, and happens rarely.
        if not train:
            with self._share_memory(inputs[0]):
                return self._eager.run(inputs, factor, train=False)
        wanted = self._describe(inputs[0])
        # Only one size has graphs, because each size would need gradients in memory of its own.
        if self._graphs is not None and self._graphs.wanted != wanted:
            self._drop_graphs()
        if self._count_hooks() != self._hooks or not self._can_record(inputs[0]):
            return self._run_eagerly(inputs, factor)
        # A real step comes first. It compiles kernels and lets libraries choose theirs, which
        # cannot be recorded. Later microbatches have kernels that add to gradients.
        adds = len(inputs) > 1
        is_recorded = self._graphs is not None and self._graphs.adds >= adds
        if not is_recorded and self._warm not in ((wanted, True), (wanted, adds)):
            self._warm = wanted, adds
            # The later microbatches have had all gradients beside their activations.
            self._needs_gradients &= not adds
            return self._run_eagerly(inputs, factor)
        # This is the second step with these sizes, or a later one.
        if not is_recorded:
            with self._eager.progress.enter(Phase("the recording of graphs")):
                is_recorded = self._prepare_graphs(inputs, wanted)
        if not is_recorded:
            return self._run_eagerly(inputs, factor)
        assert self._graphs is not None, "graphs were prepared"
        return self._graphs.repeat(inputs, factor)

    def _describe(self, inputs: Inputs) -> Any:
        """Return what must be equal for a graph to be right, apart from what is copied."""
        shapes = [getattr(inputs, name) for name in _TENSORS]
        sizes = tuple(None if each is None else each.shape for each in shapes)
        # A run turns float8 on at an iteration, and has other kernels from then on.
        in_float8 = [each.products is not None for each in self._linears]
        # A graph reads the parameters at these addresses.
        return sizes, in_float8, [parameter.data_ptr() for parameter in self._parameters]

    def _can_record(self, inputs: Inputs) -> bool:
        # Bounds of documents are Python numbers, and likelihoods are tensors of the caller.
        if self._is_paused or self._given_up or inputs.tokens.shape[1] < self._shortest:
            return False
        return all(getattr(inputs, name) is None for name in _FIXED)

    def _count_hooks(self) -> int:
        """Return the number of hooks of the blocks, which a graph would not call."""
        # Statistics, replays and the comparison of ranks add hooks for single steps.
        blocks = self._model.blocks.children()
        return sum(len(it._forward_hooks) + len(it._forward_pre_hooks) for it in blocks)

    # -- graphs -----------------------------------------------------------------------------------

    def _prepare_graphs(self, inputs: Sequence[Inputs], wanted: Any) -> bool:
        """Record the graphs that a step needs and that do not exist. Return whether they exist."""
        try:
            if self._graphs is None:
                added = 4 * sum(p.numel() for p in self._parameters)
                if shortage := self._recorder.find_shortage(added * self._needs_gradients):
                    return self._give_up(f"memory: {shortage}")
                self._graphs = _Graphs(self._eager, self._model, self._recorder, inputs[0], wanted)
            # A ramp-up of the batch size may begin with one microbatch.
            if len(inputs) > 1:
                self._graphs.record_sum()
        except RecordingError as error:
            return self._give_up(f"recording failed at {error}")
        return True

    def _give_up(self, why: str) -> bool:
        self._given_up = True
        self._drop_graphs()
        self._log(f"warning: --cuda-graph: microbatches run without graphs: {why}")
        return False

    def _drop_graphs(self) -> None:
        # A gradient in the memory of a graph would keep that memory allocated.
        self._graphs = None
        for parameter in self._parameters:
            parameter.grad = None

    # -- eager passes -----------------------------------------------------------------------------

    def _run_eagerly(self, inputs: Sequence[Inputs], factor: float | Tensor) -> Tensor:
        """Run microbatches, and leave the gradients where the graphs write them."""
        if self._graphs is None:
            return self._eager.run(inputs, factor, train=True)
        # The sum has the order of the eager runner. It is made outside of the shared memory.
        total = torch.zeros((), dtype=torch.float32, device=inputs[0].tokens.device)
        with self._share_memory(inputs[0]):
            with self._graphs.keep_gradients():
                loss = self._eager.compute_gradients(inputs[0], factor, first=True)
                total += loss / len(inputs)
            for microbatch in inputs[1:]:
                loss = self._eager.compute_gradients(microbatch, factor, first=False)
                total += loss / len(inputs)
        self._eager.finish_sums()
        return total

    @contextmanager
    def _share_memory(self, inputs: Inputs) -> Iterator[None]:
        """Let eager passes use the memory of the graphs, if there are some."""
        if self._graphs is None:
            yield
            return
        # The model keeps these tables longer than the passes.
        _make_positions(self._model, inputs)
        with self._recorder.share_memory():
            yield


class _Graphs:
    """The graphs of one size of microbatches, and the memory that they use."""

    def __init__(
        self,
        eager: SingleStageRunner,
        model: GPT,
        recorder: GraphRecorder,
        example: Inputs,
        wanted: Any,
    ) -> None:
        """Record the graph of the first microbatch. The parameters have no gradients.

        Args:
            eager: Computes a microbatch.
            model: The model.
            recorder: Records the graphs.
            example: A microbatch of the size.
            wanted: See `CapturedRunner._describe`.

        Raises:
            RecordingError: See `GraphRecorder.record`.
        """
        self.wanted = wanted
        self._eager = eager
        self._model = model
        self._recorder = recorder
        self._parameters = list(model.parameters())
        self._copied = [name for name in _TENSORS if getattr(example, name) is not None]
        copies: dict[str, Any] = {name: getattr(example, name).clone() for name in self._copied}
        self._inputs = replace(example, **copies)
        self._fixed = list(copies.values())
        self._factor = torch.zeros((), dtype=torch.float32, device=example.tokens.device)
        self._loss = torch.zeros_like(self._factor)
        # An evaluation of another length replaces the tables of the model. These are those that the
        # graphs read.
        self._positions = _make_positions(model, self._inputs)
        for parameter in self._parameters:
            parameter.grad = None
        # Autograd takes memory of the pool for each gradient. Each repetition writes it again.
        self._first = recorder.record(partial(self._compute, first=True))
        # Sums of vectors become gradients at the end of a step, and are None until then.
        self._added = [parameter.grad for parameter in self._parameters]
        eager.finish_sums()
        self.gradients = [parameter.grad for parameter in self._parameters]
        self._others: Callable[[], None] | None = None

    @property
    def adds(self) -> bool:
        """Whether there is a graph of the later microbatches."""
        return self._others is not None

    def record_sum(self) -> None:
        """Record the graph of the later microbatches, if there is none.

        Raises:
            RecordingError: See `GraphRecorder.record`.
        """
        if self._others is None:
            # Autograd adds to the memory that the first graph writes.
            self._set_gradients(self._added)
            self._others = self._recorder.record(partial(self._compute, first=False))

    def _compute(self, *, first: bool) -> None:
        self._loss.copy_(self._eager.compute_gradients(self._inputs, self._factor, first=first))

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def repeat(self, inputs: Sequence[Inputs], factor: float | Tensor) -> Tensor:
        """Repeat the graphs for the microbatches of a step, and return the mean loss."""
        self._eager.progress.begin_part("repeated graphs")
        # The engine has dropped its references at the end of the last step.
        self._set_gradients(self.gradients)
        # The loss scale may have changed, and the graph reads the factor from its memory.
        self._factor.fill_(factor)
        total = torch.zeros_like(self._loss)
        graph: Callable[[], None] | None = self._first
        for microbatch in inputs:
            assert graph is not None, "the graph of the later microbatches was recorded"
            # One launch copies all inputs.
            foreach_copy_(self._fixed, [getattr(microbatch, name) for name in self._copied])
            graph()
            # The next repetition overwrites the loss.
            total += self._loss / len(inputs)
            graph = self._others
        return total

    @contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Move the gradients of an eager microbatch to the memory that the graphs write.

        Those of a block are moved at the end of its backward pass. So there is memory for a second
        set of one block's gradients only.
        """
        kept = dict(zip(self._parameters, self._added, strict=True))

        def move(parameters: Sequence[nn.Parameter]) -> None:
            for parameter in parameters:
                gradient, target = parameter.grad, kept[parameter]
                if gradient is not None and target is not None and gradient is not target:
                    target.copy_(gradient)
                    parameter.grad = target

        def watch(block: nn.Module, arguments: tuple[Any, ...]) -> None:
            own = list(block.parameters())
            # The gradient of its input is the last one of a block.
            x = arguments[0]
            if x.requires_grad:
                x.register_hook(lambda _: move(own))

        hooks: list[RemovableHandle] = [
            block.register_forward_pre_hook(watch) for block in self._model.blocks.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            move(self._parameters)


def _make_positions(model: GPT, inputs: Inputs) -> object:
    """Return the tables of positions that the model reads, which it keeps until sizes change."""
    # Without FSDP2, parameters have the dtype of the computation.
    dtype = next(model.parameters()).dtype
    return model.position_tables.make_positions(inputs.take_own(model.context), dtype)


def find_shortest_recorded(curriculum: Curriculum | None, first: int, last: int) -> int:
    """Return the shortest sequence length that gets graphs, of iterations `first` to `last`.

    A recording costs about a step. A curriculum may have hundreds of lengths, and most tokens are
    in the longest samples.
    """
    if curriculum is None:
        return 0
    lengths = sorted({length for _, length in curriculum.iterate_stages(first, last)})
    return lengths[-_LENGTHS:][0]


def capture_microbatches(
    engine: NativeEngine, plan: Plan, mesh: Mesh, recorder: GraphRecorder
) -> CapturedRunner:
    """Let an engine of one stage without FSDP2 repeat its microbatches, and return its runner."""
    (model,) = engine.stages
    assert isinstance(engine.runner, SingleStageRunner), "a pipeline has no graphs"
    runner = CapturedRunner(
        engine.runner,
        model,
        recorder,
        shortest=find_shortest_recorded(
            plan.curriculum, plan.start_iteration + 1, plan.train_iters
        ),
        has_eager_steps=runs_eager_passes(plan.config),
        log=mesh.ranks.log,
    )
    engine.runner = runner
    return runner
