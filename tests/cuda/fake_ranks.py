"""What the tests run in the process with the fake GPU. torch is imported only there."""

import contextlib
import gc
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.config.cli import load_config
from megatron.dry_run.record import RankReport, StepTrace
from megatron.operations.slurm.node_report import NodeLimits, NodeReport
from megatron.plan import Plan, resolve

if TYPE_CHECKING:
    from megatron.data.batches import Microbatch

GPT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --vocab-size 101 --train-iters 10 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
"""Flags of a small GPT-2: learned positions, LayerNorm, biases, tied embeddings."""
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
    from megatron.dry_run.step import make_batch, run_rank

    def make(number: int, size: int, length: int) -> "list[Microbatch]":
        batch = make_batch(number, size, length)
        if not case.documents:
            return batch
        bounds = ((0, 5, length), *[(0, length)] * (size - 1))
        return [replace(each, documents=bounds) for each in batch]

    with plant(case.fault):
        return run_rank(plan_case(case), case.rank, steps=case.steps, make=make)


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
    from megatron.dry_run.step import get_gpu
    from megatron.training.pretrain import pretrain

    gpu = get_gpu()
    gpu.forget_memory()
    with gpu:
        gpu.start_step()
        pretrain(load_config(arguments))
        return gpu.end_step()


def train_without_pinning(arguments: list[str]) -> tuple[StepTrace, str]:
    """Train as `train` does, on a GPU that pins no memory. Return what it did, and its log."""
    import torch

    from megatron.dry_run.step import get_gpu

    # `cudart` is the stand-in from here on.
    get_gpu()
    runtime = torch.cuda.cudart()
    log = io.StringIO()
    with (
        mock.patch.object(runtime, "cudaHostRegister", return_value=OUT_OF_MEMORY),
        contextlib.redirect_stdout(log),
    ):
        return train(arguments), log.getvalue()


def pin_buffers() -> list[tuple[int, int, str | None]]:
    """Return what is pinned after each of several divisions of a buffer, and after its end.

    An entry has the bytes that were pinned until then, those that still are, and the refusal.
    """
    import torch

    from megatron.checkpoint.host_buffer import HostBuffer
    from megatron.dry_run.step import get_gpu

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

    from megatron.dry_run.step import FakeRank, make_batch, run_rank

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
    from megatron.dry_run.step import FakeRank, run_rank

    results: list[Any] = []

    def visit(rank: FakeRank) -> None:
        rank.gpu.start_step()
        results.append(rank.engine.check_invariants(repair=False, iteration=1, last_good=None))
        results.append(rank.engine.compute_parameter_norm())
        results.append(rank.gpu.end_step())

    run_rank(plan_case(case), case.rank, visit=visit)
    return tuple(results)


def probe_node(world_size: int, memory_gib: float) -> tuple[NodeReport, StepTrace]:
    """Probe the fake GPU, and the all-reduce of a fake world of this size."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.dry_run.stand_ins import GPU
    from megatron.dry_run.step import get_gpu
    from megatron.operations.slurm import node_probe

    gpu = get_gpu()
    gpu.forget_memory()
    limits = NodeLimits(memory_gib=memory_gib)
    findings = node_probe._ProbeFindings(0, lambda report: None)
    # The matrices are drawn on the CPU first, and drawing large ones takes seconds.
    before = node_probe._SIZES
    node_probe._SIZES = {**before, "cuda": (512, before["cuda"][1])}
    with gpu:
        gpu.start_step()
        try:
            node_probe._memory(findings, limits, GPU)
            node_probe._product(findings, limits, GPU)
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
            node_probe._all_reduce(findings, GPU)
        finally:
            node_probe._SIZES = before
            if dist.is_initialized():
                dist.destroy_process_group()
        return findings.report, gpu.end_step()
