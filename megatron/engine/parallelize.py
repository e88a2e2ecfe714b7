"""The construction of this rank's part of the model: what is applied to it, and in which order.

Both engines use it. `build_stages` is the one place to read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.base.errors import ConfigError
from megatron.model.dropout import Dropout
from megatron.model.execution import Execution
from megatron.model.experts.routing import list_routers
from megatron.model.gpt import GPT
from megatron.model.partition import select_stages_of_rank
from megatron.model.recompute import Recomputation
from megatron.parallel.entered_linear import offer_to_graphs
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.torch_private import find_compilation_error
from megatron.parallel.weight_gradient import number_layer
from megatron.plan.run_plan import Plan

if TYPE_CHECKING:
    from megatron.engine.sharding import ShardedModel


@dataclass(frozen=True)
class RankStage:
    """A pipeline stage of this rank, with everything applied to it."""

    model: GPT
    specs: Mapping[str, ParameterSpec]
    """Name of a parameter -> its spec."""
    sharded: "ShardedModel | None"
    """The model as FSDP2 shards it, or None if it is not sharded."""


def build_stages(
    plan: Plan, mesh: Mesh, execution: Execution, *, use_fsdp: bool
) -> list[RankStage]:
    """Build this rank's stages, in the order of the layers. Their weights are zero.

    Args:
        plan: The plan of the run.
        mesh: This rank's mesh.
        execution: How the blocks are computed.
        use_fsdp: Shard the stages with FSDP2 if there are several data-parallel ranks. DeepSpeed
            shards them itself.
    """
    # 1. Pipeline stages. They come first, so that a rank builds no layer of another rank.
    layers_of_stages = select_stages_of_rank(
        plan.stages, mesh.coordinate.pipeline, mesh.grid.pipeline
    )
    dtype = execution.dtype or torch.float32
    # FSDP2 shards parameters that have no memory yet. A rank therefore never needs the memory of a
    # complete stage. Without FSDP2, a rank needs that memory in any case.
    sharding = use_fsdp and mesh.shards_weights
    device = mesh.device
    if sharding:
        device = torch.device("meta")
    stages = []
    for layers in layers_of_stages:
        # 2. Tensor-parallel shards. Each layer creates its own shard only, so this is part of the
        #    construction. The layers also contain the collectives of the tensor group.
        with device:
            model = GPT(
                plan.shape,
                mesh.tensor_parallel,
                layers,
                execution,
                plan.config.loss,
                mesh.context_parallel,
                mesh.expert_parallel,
            )
        # FSDP2 and `to` replace the parameters by new ones without the attribute `spec`. So the
        # attribute is read before both.
        specs: dict[str, ParameterSpec] = {
            name: parameter.spec  # type: ignore[attr-defined]
            for name, parameter in model.named_parameters()
        }
        # 3. Recomputation. It wraps the call of a block, and stays outside of the compiled graphs.
        #    Fused gradients and kernels are operators inside of the graphs.
        recompute_blocks(model, execution)
        if execution.fused_gradients:
            fuse_gradients(model)
        fuse_operators(model, execution)
        # 4. Compilation of what is inside of a block. FSDP2's hooks on the block come later, and
        #    are not part of the graphs.
        compile_blocks(model, execution)
        # 5. Data-parallel shards, of what tensor parallelism left on this rank. FSDP2 needs the
        #    finished blocks, because it hooks into them.
        sharded = None
        if sharding:
            # FSDP2 takes a second to import on every rank. A run without it does not need it.
            from megatron.engine.sharding import ShardedModel

            sharded = ShardedModel(
                model,
                mesh.sharding,
                mesh.expert_parallel,
                stage=plan.config.parallel.zero_stage,
                compute_dtype=dtype,
                reduce_dtype=(
                    torch.bfloat16 if plan.config.parallel.grad_reduce_in_bf16 else torch.float32
                ),
                comm_timer=mesh.tensor_parallel.comm_timer,
                fused_gradients=execution.fused_gradients,
            )
        # 6. Memory, after the size of the shards is known. The engine refers to the memory from now
        #    on, so it stays where it is during the run.
        for router in list_routers(model):
            router.allocate(mesh.device)
        if sharded is not None:
            sharded.allocate_shards(mesh.device)
        elif use_fsdp:
            # FSDP2 would cast its fp32 shards when it gathers them. Without it, the parameters are
            # copies of the engine's fp32 masters.
            model.to(dtype)
        _fill_with_zeros(model)
        # 7. The kernels of attention. FSDP2's first forward pass, in 6, has so few tokens that some
        #    kernels would refuse them.
        choose_attention_kernels(model, execution)
        stages.append(RankStage(model, specs, sharded))
    # 8. The engine puts its pipeline around the finished stages: `build_runner`, or DeepSpeed's
    #    PipelineModule.
    return stages


def choose_attention_kernels(model: GPT, execution: Execution) -> None:
    """Let attention use only the kernels that `execution` asks for."""
    for block in model.get_blocks().values():
        block.attention.kernels = execution.attention_kernels


def recompute_blocks(model: GPT, execution: Execution) -> None:
    """Enable the recomputation of blocks or attention cores that `execution` asks for."""
    for number, block in model.get_blocks().items():
        block.attention.recompute_core = execution.recompute_attention_core
        if execution.is_recomputed(number):
            block.enable_recomputation(
                Recomputation(
                    model.tp,
                    partition=execution.partition_activations,
                    in_cpu=execution.checkpoint_in_cpu,
                    kept_operators=execution.kept_operators,
                    keep_generator=execution.draws_by_kernel,
                )
            )


def fuse_gradients(model: GPT) -> None:
    """Let linear layers add to their weights' gradients in fp32."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.number = number_layer(module)


def fuse_operators(model: GPT, execution: Execution) -> None:
    """Let the blocks use the kernels of `execution`."""
    for block in model.get_blocks().values():
        block.attention.operators = execution.operators
        block.mlp.use_operators(execution.operators)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.kernel = execution.operators.drop
            module.by_attention_kernel = execution.draws_by_kernel


def compile_blocks(model: GPT, execution: Execution) -> None:
    """Compile the blocks if `execution` asks for it."""
    if not execution.compile:
        return
    offer_to_graphs(model.tp)
    for block in model.get_blocks().values():
        block.compile_halves(dynamic=execution.dynamic_shapes)


def _fill_with_zeros(model: GPT) -> None:
    # Initialisation fills only the rows of real ids. Vocabulary padding stays zero permanently,
    # because its gradient is zero too.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def shard_offset(rows: int, rank: int, ranks: int) -> int:
    """Return the first of `rows` rows that FSDP2 gives to `rank`.

    FSDP2 divides the rows as `torch.chunk` does. All shards have equal size, except that the last
    ones may be shorter or empty.
    """
    size = -(-rows // ranks)
    return min(rank * size, rows)


def require_compiler(device: torch.device) -> None:
    """Compile a small function to find out whether torch.compile works on this machine.

    It needs a C++ compiler for the CPU and Triton for a GPU. PyTorch detects a missing one only in
    the middle of the first step.

    Raises:
        ConfigError: The compilation fails. The message has the compiler's reason.
    """
    x = torch.ones(8, device=device)
    try:
        torch.compile(_probe)(x)
    except find_compilation_error() as failure:
        # The exception's text has many lines of hints. The first one names the cause.
        reason = next(iter(f"{failure}".splitlines()), type(failure).__name__)
        needed = "Triton and a C compiler"
        if device.type == "cpu":
            needed = "a C++ compiler (g++; $CXX names another one)"
        raise ConfigError(
            f"--use-torch-compile is given, but torch.compile fails on this machine ({reason}); it "
            f"needs {needed}: install what is missing or leave the flag out"
        ) from failure


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2
