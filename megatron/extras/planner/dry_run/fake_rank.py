"""A training step of one rank on the fake GPU.

The process group is torch's fake one, which has any size and sends nothing. A rank is therefore
run alone, whatever the world size is.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.data.batches import Microbatch
from megatron.engine.native import NativeEngine
from megatron.extras.planner.dry_run.fake_gpu import FakeGpu
from megatron.extras.planner.dry_run.process import choose_fake_kernels
from megatron.extras.planner.dry_run.record import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    RankReport,
)
from megatron.extras.planner.dry_run.stand_ins import DEFAULT_STREAM, GPU
from megatron.extras.step.float8.kind import FLOAT8
from megatron.extras.step.kernels.kind import add_attention, build_operators
from megatron.model.experts import dispatch, layer
from megatron.model.layer_parts import SOFTMAXES
from megatron.observe.timers import COMMUNICATION, Timers
from megatron.parallel.mesh import ExpertParallel, Mesh, build_mesh
from megatron.plan.run_plan import Plan

MakeBatch = Callable[[int, int, int], list[Microbatch]]
"""Takes m, b and s. Returns m microbatches of [b, s]."""


@dataclass(frozen=True)
class FakeRank:
    """A rank on the fake GPU, with its engine."""

    plan: Plan
    mesh: Mesh
    timers: Timers
    engine: NativeEngine
    gpu: FakeGpu

    def train(self, microbatches: Sequence[Microbatch], iteration: int = 1) -> None:
        """Run a training step."""
        # The training loop has two votes in each step (`Exits.vote`), and a digest of the batch.
        votes = (0.0, 0.0, 0.0)
        self.engine.train_batch(microbatches, iteration=iteration, lr=1e-4, vote=lambda: votes)


@cache
def get_gpu() -> FakeGpu:
    """Return the fake GPU of this process."""
    return FakeGpu()


def make_batch(number: int, size: int, length: int) -> list[Microbatch]:
    """Return microbatches of zeros, in ordinary memory as the data loader makes them."""

    def make_tokens() -> torch.Tensor:
        return torch.zeros((size, length), dtype=torch.long)

    return [Microbatch(make_tokens(), make_tokens()) for _ in range(number)]


def run_rank(
    plan: Plan,
    rank: int,
    microbatches: int | None = None,
    *,
    steps: int = 1,
    imbalance: float = 1.0,
    make: MakeBatch = make_batch,
    visit: Callable[[FakeRank], Any] = lambda rank: None,
) -> RankReport:
    """Build the engine of a rank, run training steps, and return what the last step did.

    Args:
        plan: A plan without errors.
        rank: The rank of the world.
        microbatches: Number of microbatches of a step. Default: that of the final batch size.
        steps: Number of steps.
        imbalance: Rows of this rank's experts, in multiples of those of a balanced run.
        make: Makes the microbatches. They have the full sequence length.
        visit: Called with the rank before the steps.
    """
    plan.raise_on_errors()
    plan = choose_fake_kernels(plan)
    if microbatches is None:
        microbatches = plan.get_num_microbatches(plan.batch_size.final)
    with use_rank(plan, rank, imbalance) as built:
        visit(built)
        batch = plan.config.batch
        for number in range(1, steps + 1):
            # New ones for each step, as the data loader makes them.
            samples = make(microbatches, batch.micro_batch_size, plan.config.model.seq_length)
            built.gpu.start_step()
            built.train(samples, number)
            record = built.gpu.end_step()
        coordinate = str(built.mesh.coordinate)
    return RankReport(rank, coordinate, microbatches, record, imbalance)


@contextmanager
def use_rank(plan: Plan, rank: int, imbalance: float = 1.0) -> Iterator[FakeRank]:
    """Build a rank, and let operators run on its fake GPU.

    Args:
        plan: A plan that `choose_fake_kernels` has returned.
        rank: The rank of the world.
        imbalance: See `run_rank`.
    """
    # Engines are in reference cycles. This rank would slow down with the tensors of an earlier one.
    gc.collect()
    assume_loads(imbalance)
    get_gpu().forget_memory()
    with get_gpu():
        try:
            yield build_rank(plan, rank)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def assume_loads(imbalance: float) -> None:
    """Let this rank receive the rows of balanced experts x `imbalance`. No fake router chooses."""
    read = dispatch.read_sizes

    def plan_with_loads(choice: torch.Tensor, experts: int, ranks: ExpertParallel) -> Any:
        rows = choice.numel()

        def assume(sent: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
            # The host waits, whatever it reads.
            read(sent, received)
            # What cannot be divided goes to the first ranks.
            parts = [
                rows // ranks.size + (other < rows % ranks.size) for other in range(ranks.size)
            ]
            own = min(rows, round(imbalance * parts[ranks.rank]))
            return parts, [own] * ranks.size

        dispatch.read_sizes = assume
        try:
            return dispatch.plan_dispatch(choice, experts, ranks)
        finally:
            dispatch.read_sizes = read

    layer.plan_dispatch = plan_with_loads


def build_rank(plan: Plan, rank: int) -> FakeRank:
    """Build the mesh and the engine of a rank, inside of the fake GPU."""
    gpu = get_gpu()
    if plan.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    parallel = plan.config.parallel
    timers = Timers(GPU)
    mesh = build_mesh(
        plan.grid,
        GPU,
        sequence_parallel=parallel.sequence_parallel,
        exchange_heads=parallel.exchanges_heads,
        shard_size=plan.shard_size,
        expert_size=plan.expert_size,
        comm_timer=lambda: timers(COMMUNICATION),
        # The fake group has the host's messages too. A second one would have all ranks again.
        control=dist.new_group(backend="fake") if plan.world_size > 1 else None,
    )
    gpu.groups = name_groups(mesh)
    model = plan.config.model
    operators = build_operators(plan.config.kernels, has_dropout=model.has_dropout)
    # An engine gets these from its kind, and this one is built without it.
    if SOFTMAXES.require(model.softmax_type).weigh is not None:
        operators = add_attention(model.softmax_type, operators)
    # The engine needs the function before the rank exists that the function labels.
    built: list[FakeRank] = []

    def label_gradients() -> None:
        for master in built[0].engine._masters:
            gpu.memory.label(master.weight.grad, GRADIENTS)

    engine = _choose_engine(plan)(
        plan,
        mesh,
        timers,
        before_update=label_gradients,
        # Drawing billions of numbers would take minutes, and fake tensors could not hold them.
        initialise=lambda *arguments: None,
        operators=operators,
    )
    gpu.groups = name_groups(mesh, engine)
    built.append(FakeRank(plan, mesh, timers, engine, gpu))
    _label_state(built[0])
    gpu.streams = _name_streams(engine)
    return built[0]


def _choose_engine(plan: Plan) -> type[NativeEngine]:
    """Return the engine of a plan. DeepSpeed's has no dry run, so its plans have the native one.

    Raises:
        ConfigError: torchao is not installed, and the plan has float8.
    """
    if plan.config.precision.fp8_format is None:
        return NativeEngine
    return cast(type[NativeEngine], FLOAT8.load("cuda"))


def name_groups(mesh: Mesh, engine: NativeEngine | None = None) -> dict[str, str]:
    """Return torch's names of the groups -> their names in the report.

    Args:
        mesh: The rank's groups.
        engine: The engine, if it exists. Muon has a group of its own.
    """
    copy = None
    if engine is not None:
        copy = getattr(engine._optimizer, "_group", None)
    groups: dict[str, dist.ProcessGroup | None] = {
        "copy": copy,
        "control": mesh.control,
        "world": dist.group.WORLD if mesh.devices is not None else None,
    }
    if mesh.devices is not None:
        groups["pipeline"] = mesh.devices.get_group("pp")
        groups["data"] = mesh.devices.get_group("dp")
    # With one copy, the ranks that share it are the data group.
    if mesh.sharding.mesh is not None and mesh.sharding.copies > 1:
        groups["shards"] = mesh.sharding.mesh.get_group()
    groups["replicas"] = mesh.sharding.replicas
    groups["ends"] = mesh.ends
    experts = mesh.expert_parallel
    if experts is not None:
        groups["stage"] = experts.stage.group
        shared = experts.sharding
        if shared.mesh is not None and shared.size > 1:
            groups["equal experts"] = shared.mesh.get_group()
        groups["copies of experts"] = shared.replicas
    groups["context"] = mesh.context_parallel.group
    groups["tensor"] = mesh.tensor_parallel.group
    if experts is not None:
        groups["experts"] = experts.group
    # A group of one axis may be the world itself. The name of the axis is more precise.
    return {group.group_name: name for name, group in groups.items() if group is not None}


def _label_state(rank: FakeRank) -> None:
    """Label the memory that the engine keeps from the start."""
    memory = rank.gpu.memory
    for master in rank.engine._masters:
        for kind in rank.engine._optimizer.get_kinds(master):
            memory.label(rank.engine._optimizer.get_moment(master, kind), OPTIMIZER)
        memory.label(master.weight.data, OPTIMIZER)
    # After the masters, because in fp32 they are the parameters themselves.
    for stage in rank.engine.stages:
        for parameter in stage.parameters():
            memory.label(rank.engine._get_local_tensor(parameter.detach()), WEIGHTS)
    _watch_gradients(rank)


def _watch_gradients(rank: FakeRank) -> None:
    """Label the gradients of gathered weights when autograd makes them."""

    def label(parameter: torch.Tensor) -> None:
        rank.gpu.memory.label(parameter.grad, GRADIENTS)

    for stage in rank.engine._rank_stages:
        if stage.sharded is None:
            continue
        for module in stage.sharded._sharded:
            for group in list_parameter_groups(module):
                for each in group.fsdp_params:
                    each.unsharded_param.register_post_accumulate_grad_hook(label)


def list_parameter_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of parameters of a module."""
    state = module._get_fsdp_state()
    # torch 2.11 and 2.12 have one group.
    one = getattr(state, "_fsdp_param_group", None)
    return state._fsdp_param_groups if one is None else [one]


def _name_streams(engine: NativeEngine) -> dict[int, str]:
    """Return the number of a stream -> its name. FSDP2 has several."""
    # FSDP2 makes its streams in its first forward pass, which the engine's construction runs.
    names = {0: DEFAULT_STREAM}
    for stage in engine._rank_stages:
        if stage.sharded is None:
            continue
        streams = vars(stage.sharded._root._get_fsdp_state()._comm_ctx)
        for name, stream in streams.items():
            if isinstance(stream, torch.Stream):
                names[stream.stream_id] = name.removesuffix("_stream").replace("_", "-")
    return names
