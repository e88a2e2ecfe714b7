"""What the tests run in the process with the fake GPU. torch is imported only there."""

import contextlib
import gc
import io
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.commands.parts import choose_parts
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.dry_run.process import choose_microbatches
from megatron.extras.planner.dry_run.record import Product, RankReport, StepTrace
from megatron.parallel.grid import Grid, GridCoordinate
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.data.batches import Microbatch

GPT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --vocab-size 101 --train-iters 10 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
"""Flags of a small GPT-2: learned positions, LayerNorm, biases, tied embeddings."""
PLAIN = (
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--no-residual-norm-fusion --no-cross-entropy-loss-fusion --attention-backend auto "
)
"""Flags of a step with PyTorch's operators."""
OUT_OF_MEMORY = 2
"""CUDA's number of this error."""


@dataclass(frozen=True)
class Case:
    """A rank that is run on the fake GPU."""

    flags: str
    world_size: int = 1
    rank: int = 0
    ranks_per_node: int = 8
    documents: bool = False
    """Whether attention stays inside documents."""
    fault: str = ""
    """The key of `FAULTS` that is planted."""
    steps: int = 1
    """The last one is recorded. The first one may build tables that later steps keep, so a case
    with such tables has two."""


def plan_case(case: Case) -> Plan:
    """Return the plan of a case."""
    config = load_config(shlex.split(GPT + case.flags)).config
    plan = resolve(config, case.world_size, ranks_per_node=case.ranks_per_node)
    plan.raise_on_errors()
    return plan


def run_case(case: Case) -> RankReport:
    """Run the steps of a case, and return the report of the last one."""
    from megatron.extras.planner.dry_run.fake_rank import make_batch, run_rank

    def make(number: int, size: int, length: int) -> "list[Microbatch]":
        batch = make_batch(number, size, length)
        if not case.documents:
            return batch
        bounds = ((0, 5, length), *[(0, length)] * (size - 1))
        return [replace(each, documents=bounds) for each in batch]

    with plant(case.fault):
        return run_rank(plan_case(case), case.rank, steps=case.steps, make=make)


def measure_peaks(flags: str, world_size: int, stages: Sequence[int]) -> list[int]:
    """Return the peak bytes of pipeline ranks in a step of a complete command."""
    from megatron.extras.planner.dry_run.fake_rank import run_rank

    plan = resolve(load_config(shlex.split(flags)).config, world_size)
    parallel = plan.config.parallel
    grid = Grid(
        parallel.pipeline_model_parallel_size,
        plan.data_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    microbatches = choose_microbatches(plan)
    return [
        run_rank(plan, grid.get_rank(GridCoordinate(stage, 0, 0)), microbatches).step.peak_bytes
        for stage in stages
    ]


def run_loads(flags: str, world_size: int, imbalance: float) -> RankReport:
    """Run a step of the first rank with a load of its experts, in multiples of the mean."""
    from megatron.extras.planner.dry_run.fake_rank import run_rank

    plan = resolve(load_config(shlex.split(flags)).config, world_size)
    return run_rank(plan, 0, choose_microbatches(plan), imbalance=imbalance)


@dataclass
class ParameterBytes:
    """Bytes that kernels of the computing stream move in a step for weights and gradients."""

    gathers: int = 0
    sums: int = 0
    fused: int = 0
    """Those of the gradients of layers that products in 16 bits write in fp32."""


def count_parameter_bytes(flags: str, world_size: int) -> ParameterBytes:
    """Run a step of the first rank, and count what is moved for its parameters.

    An activation must not have the shape of a parameter, and the world size must divide all rows.
    """
    from megatron.extras.planner.dry_run.fake_rank import FakeRank, get_gpu, run_rank
    from megatron.extras.planner.dry_run.stand_ins import get_current_stream

    found = ParameterBytes()
    shapes: set[tuple[int, ...]] = set()
    of_layers: set[tuple[int, ...]] = set()

    def start(rank: FakeRank) -> None:
        # The construction gathers weights too.
        found.gathers = 0
        for stage in rank.engine.stages:
            shapes.update(tuple(each.shape) for each in stage.parameters())
            # Those of vectors are added up together.
            shapes.add((sum(each.numel() for each in stage.parameters() if each.dim() == 1),))
            for block in stage.get_blocks().values():
                of_layers.update(tuple(each.shape) for each in block.parameters())

    def count(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        # FSDP2 adds up shards on a stream of its own.
        if get_current_stream().stream_id == 0:
            name = func.__name__.partition(".")[0]
            if name == "split_with_sizes_copy":
                found.gathers += 2 * args[0].nbytes
            elif name == "chunk_cat":
                found.sums += sum(each.nbytes for each in args[0]) + kwargs["out"].nbytes
            elif tuple(getattr(out, "shape", ())) in shapes:
                found.sums += _count_sum(name, args, out)
            if tuple(getattr(out, "shape", ())) in of_layers:
                found.fused += _count_product(name, args, out)

    with get_gpu().watch(count):
        run_rank(plan_case(Case(flags, world_size)), 0, visit=start)
    return found


def _count_sum(name: str, args: Any, out: Any) -> int:
    """Return the bytes of a conversion to fp32, or of a sum."""
    if name == "_to_copy" and out.dtype.itemsize > args[0].dtype.itemsize:
        return args[0].nbytes + out.nbytes
    if name == "add_":
        return args[0].nbytes + args[1].nbytes + out.nbytes
    # Vectors are joined in 16 bits. What is joined in fp32 is the message that makes gradients of
    # replicated parameters equal on all tensor-parallel ranks, once a step.
    if name == "cat" and out.dtype.itemsize == 2:
        return 2 * out.nbytes
    if name == "copy_" and out.dtype.itemsize > args[1].dtype.itemsize:
        return args[1].nbytes + out.nbytes
    return 0


def _count_product(name: str, args: Any, out: Any) -> int:
    """Return the bytes of the result of a product of 16-bit matrices in fp32."""
    # Both operators have a factor there.
    if name not in ("mm", "addmm") or out.dtype.itemsize == args[1].dtype.itemsize:
        return 0
    return out.nbytes * (2 if name == "addmm" else 1)


@dataclass
class PaddingReport:
    """The products of matrices in 16 bits in a step, and what their padding moves."""

    products: int = 0
    slow: list[str] = field(default_factory=list)
    """Products with a size that is no multiple of 8, or with rows of no multiple of 16 bytes."""
    moved: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    """torch's operator and the shape of its result -> the bytes that it reads and writes."""


def find_padding(case: Case) -> PaddingReport:
    """Run a step, and return what its products and copies are."""
    from megatron.extras.planner.dry_run.fake_gpu import _FACTORS
    from megatron.extras.planner.dry_run.fake_rank import FakeRank, get_gpu, run_rank

    found = PaddingReport()

    def start(_: FakeRank) -> None:
        # The construction has products of few rows, which are not padded.
        found.products = 0
        found.slow.clear()
        found.moved.clear()

    def record(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.__name__.partition(".")[0]
        # Inside the operators of a compiled graph, torch does not replace these two by others.
        if name == "contiguous" and not args[0].is_contiguous():
            name = "clone"
        first = {**_FACTORS, "linear": 0}.get(name)
        if first is not None and args[first].element_size() == 2:
            found.products += 1
            matrices = (*args[first : first + 2], out)
            if any(_is_slow(each) for each in matrices):
                found.slow.append(" ".join(f"{tuple(each.shape)}" for each in matrices))
        if name in _PADDING:
            read = args[: _PADDING[name]]
            found.moved[name, tuple(out.shape)] += out.nbytes + sum(each.nbytes for each in read)

    with get_gpu().watch(record):
        run_rank(plan_case(case), case.rank, visit=start)
    return found


_PADDING = {"copy_": 1, "clone": 1, "add_": 2}
"""Operator that moves padded matrices -> how many matrices it reads. They have one shape."""


def _is_slow(matrix: Any) -> bool:
    """Return whether Tensor Cores read or write a matrix slowly."""
    width = matrix.shape[-1]
    lengths = [stride * matrix.element_size() for stride in matrix.stride() if stride != 1]
    sizes = (width, matrix.numel() // width)
    return any(size % 8 for size in sizes) or any(length % 16 for length in lengths)


def count_attention(case: Case) -> dict[str, int]:
    """Run the steps of a case. Return how often the operators of attention ran."""
    return {
        name.partition(".")[0]: count
        for name, count in count_operators(case).items()
        if any(part in name for part in ("varlen_attn", "dot_product", "flash_attention"))
        or name.startswith("_safe_softmax")
    }


def count_attention_of_first_call(case: Case) -> dict[str, int]:
    """Return the same for a process in which torch has not installed its own order yet."""
    from megatron.extras.planner.dry_run.stand_ins import FakeOrder

    FakeOrder.installed = False
    return count_attention(case)


def count_operators(case: Case) -> dict[str, int]:
    """Run the steps of a case. Return how often each of torch's operators ran on the GPU."""
    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    counts: Counter[str] = Counter()

    def count(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        counts[func.__name__] += 1

    with get_gpu().watch(count):
        run_case(case)
    return dict(counts)


@contextmanager
def plant(fault: str) -> Iterator[None]:
    """Break the code in one place within a `with` block."""
    import torch
    import torch.distributed as dist

    from megatron.model.mlp import MLP
    from megatron.parallel import collectives

    forward = MLP.forward
    send = collectives.all_reduce

    def read_back(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * float(x.sum())

    def branch(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) if bool((x > 0).any()) else x

    def mask_on_cpu(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * torch.ones(x.shape, dtype=x.dtype)

    def wrong_shape(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + x[:, :, :3]

    def copy_scalar(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * torch.tensor(1.0, device=x.device)

    def send_fp32(x: torch.Tensor, tp: Any, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            return send(x, tp, op)
        return x.copy_(send(x.float(), tp, op))

    def send_twice(x: torch.Tensor, tp: Any, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return x.copy_(send(torch.cat([x, x]), tp, op)[: len(x)])

    in_mlp = {
        "blocking read-back": read_back,
        "branch on a tensor": branch,
        "tensor on the CPU": mask_on_cpu,
        "wrong shape": wrong_shape,
        "scalar from the CPU": copy_scalar,
    }
    in_messages = {"message in fp32": send_fp32, "message twice as long": send_twice}
    try:
        if fault:
            MLP.forward = in_mlp.get(fault, forward)  # type: ignore[method-assign]
            collectives.all_reduce = in_messages.get(fault, send)
            assert fault in in_mlp or fault in in_messages, f"no fault {fault}"
        yield
    finally:
        MLP.forward = forward  # type: ignore[method-assign]
        collectives.all_reduce = send


def train(arguments: list[str]) -> StepTrace:
    """Run a complete training of one process on the fake GPU, and return what all of it did."""
    from megatron.extras.planner.dry_run.fake_rank import get_gpu
    from megatron.run.pretrain import pretrain

    gpu = get_gpu()
    gpu.forget_memory()
    with gpu:
        gpu.start_step()
        loaded = load_config(arguments)
        pretrain(read_launch(loaded, choose_parts(loaded.config)))
        return gpu.end_step()


def train_and_list_attention(arguments: list[str]) -> tuple[set[tuple[str, bool]], bool]:
    """Train as `train` does, where PyTorch's own order of attention kernels begins with cuDNN.

    The settings of the process are then as before.

    Returns:
        The operators of attention that ran, each with whether torch required deterministic kernels
        then, and whether the training compiled its layers.
    """
    import torch
    from torch.utils import deterministic

    from megatron.extras.planner.dry_run import stand_ins
    from megatron.extras.planner.dry_run.fake_rank import get_gpu
    from megatron.model.block import Block

    list_allowed = stand_ins._list_allowed_kernels

    # Newer versions of torch have this order on an H200.
    @torch.compiler.assume_constant_result
    def prefer_cudnn() -> list[str]:
        allowed: list[str] = list_allowed()
        return ["CUDNN_ATTENTION", "MATH"] if "OVERRIDEABLE" in allowed else allowed

    found: set[tuple[str, bool]] = set()

    def look(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if "dot_product" in func.__name__:
            name = func.__name__.partition(".")[0]
            found.add((name, torch.are_deterministic_algorithms_enabled()))

    compiled = mock.patch.object(
        Block, "compile_halves", autospec=True, side_effect=Block.compile_halves
    )
    torch.compiler.reset()
    try:
        with (
            get_gpu().watch(look),
            mock.patch.object(stand_ins, "_list_allowed_kernels", prefer_cudnn),
            mock.patch.dict(os.environ),
            compiled as compile_halves,
        ):
            train(arguments)
            return found, compile_halves.called
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def train_without_pinning(arguments: list[str]) -> tuple[StepTrace, str]:
    """Train as `train` does, on a GPU that pins no memory. Return what it did, and its log."""
    import torch

    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    # `cudart` is the stand-in from here on.
    get_gpu()
    runtime = torch.cuda.cudart()
    log = io.StringIO()
    with (
        mock.patch.object(runtime, "cudaHostRegister", return_value=OUT_OF_MEMORY),
        contextlib.redirect_stdout(log),
    ):
        return train(arguments), log.getvalue()


def count_collectives(step: StepTrace, kind: str, group: str) -> dict[tuple[str, int], int]:
    """Return (dtype, bytes) -> how often, for the messages of a kind in a group."""
    found: Counter[tuple[str, int]] = Counter()
    for each, count in step.collectives.items():
        if each.kind == kind and each.group == group:
            found[each.dtype, each.size] += count
    return dict(found)


def pin_buffers() -> list[tuple[int, int, str | None]]:
    """Return what is pinned after each of several divisions of a buffer, and after its end.

    An entry has the bytes that were pinned until then, those that still are, and the refusal.
    """
    import torch

    from megatron.checkpoint.shard_file import HostBuffer
    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    gpu = get_gpu()
    # The buffers of earlier trainings in this process.
    gc.collect()
    buffer = HostBuffer()
    found: list[tuple[int, int, str | None]] = []
    with gpu:
        gpu.start_step()

        def record() -> None:
            registered = sum(gpu.end_step().registered.values())
            found.append((registered, gpu.count_pinned_bytes(), buffer.refusal))

        for sizes in ((1, 25, 0, 65), (65, 25, 1), (1, 25, 0, 65, 1000)):
            buffer.divide({str(size): torch.empty(size, device="cuda") for size in sizes})
            record()
        buffer = HostBuffer()
        record()
    return found


def evaluate(case: Case) -> tuple[float, list[list[float]], StepTrace, StepTrace]:
    """Evaluate a batch and score another one. Return both results, and what each of them did."""
    import torch

    from megatron.extras.planner.dry_run.fake_rank import FakeRank, make_batch, run_rank

    results: list[Any] = []

    def visit(rank: FakeRank) -> None:
        batch = make_batch(4, 2, 32)
        rank.gpu.start_step()
        results.append(rank.engine.eval_batch(batch))
        evaluated = rank.gpu.end_step()
        masked = [replace(each, loss_mask=torch.ones(2, 32)) for each in batch]
        rank.gpu.start_step()
        results.append(rank.engine.score_batch(masked).tolist())
        results.extend((evaluated, rank.gpu.end_step()))

    with plant(""):
        run_rank(plan_case(case), case.rank, visit=visit)
    return tuple(results)


def check_replicas(case: Case) -> tuple[list[str], float, StepTrace]:
    """Check the invariants. Return the lines about repairs, the parameter norm, and what it did."""
    from megatron.extras.planner.dry_run.fake_rank import FakeRank, run_rank

    results: list[Any] = []

    def visit(rank: FakeRank) -> None:
        rank.gpu.start_step()
        results.append(rank.engine.check_invariants(repair=False, iteration=1, last_good=None))
        results.append(rank.engine.compute_parameter_norm())
        results.append(rank.gpu.end_step())

    run_rank(plan_case(case), case.rank, visit=visit)
    return tuple(results)


def count_rounding_bytes(case: Case) -> tuple[dict[str, int], dict[Product, int]]:
    """Run a step in float8. Return the bytes that kernels of float8 move, and the products.

    The first part has an entry for each kernel. "copies" are those in front of products, and "sums"
    those of weights' gradients.
    """
    from megatron.extras.planner.dry_run.fake_rank import get_gpu
    from megatron.extras.step.float8 import products as float8

    moved: Counter[str] = Counter()
    parts: list[str] = []

    def count(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.__name__.partition(".")[0]
        if func.namespace == "megatron" and name in _ROUNDING:
            # Kernels for all weights get lists, and write into memory that they are given.
            read = args[0] if isinstance(args[0], list) else [args[0]]
            written = out if isinstance(out, list) else [out]
            if isinstance(args[0], list):
                written = [] if isinstance(args[1][0], int) else args[1]
            of_weight = " of masters" if read[0].dtype.itemsize == 4 else ""
            moved[name + of_weight] += sum(each.nbytes for each in (*read, *written))
        elif parts and name in _MOVING and out.dim() == 2:
            # What is in place is read too.
            arguments = [each for each in args if hasattr(each, "nbytes")]
            moved[parts[-1]] += out.nbytes + sum(each.nbytes for each in arguments)

    def enter(function: Any, part: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                parts.pop()

        return call

    add = float8._Gradients.add_to_gradient
    with (
        get_gpu().watch(count),
        mock.patch.object(float8, "multiply_rounded", enter(float8.multiply_rounded, "copies")),
        mock.patch.object(float8._Gradients, "add_to_gradient", enter(add, "sums")),
    ):
        step = run_case(case).step
    return dict(moved), step.products


_ROUNDING = {"find_largest", "find_all_largest"}
_ROUNDING |= {"round_complete_rows", "round_tiles", "round_all_tiles"}
"""This trainer's kernels of float8. The update of weights is a kernel of its own."""
_MOVING = {"_to_copy", "add_", "clone", "constant_pad_nd", "mul"}
