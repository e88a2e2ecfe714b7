"""How the model is spread over devices.

Data parallelism uses the ranks that tensor, pipeline and context parallelism leave.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Range

STRATEGY_STAGES = {"fsdp": 3, "hsdp": 3, "ddp": 0}
"""Value of --sharding-strategy -> the ZeRO stage that it means."""
EXCHANGES_HEADS = {"allgather": False, "a2a": True}
"""Value of --cp-comm-type -> whether context-parallel ranks exchange positions for heads."""

IS_WATCHED = {"auto": True, "off": False}
"""Value of `--hang-timeout` that is no number -> whether there is a watchdog."""


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of parallelism, communication and the engine."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (https://arxiv.org/abs/1909.08053). Keep them inside
    one node."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are divided into."""
    pp_partition_method: str | None = None
    """How layers are divided into stages: uniform, parameters, type:REGEX (as in
    'type:transformer|embedding'), or the layers of each stage (layers:5,4,4,3)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleave: each rank has several stages of this many layers
    (https://arxiv.org/abs/2104.04473). This shortens idle times and needs more communication.
    Default: one stage a rank."""
    sequence_parallel: bool = False
    """Shard the sequence over tensor-parallel ranks where activations are otherwise replicated
    (https://arxiv.org/abs/2205.05198)."""
    context_parallel_size: int = 1
    """Ranks that share the sequence of each sample, for long sequences. They divide the activations
    and the work of attention. Keep them inside one node if tensor parallelism leaves room there."""
    cp_comm_type: Literal["allgather", "a2a"] = "allgather"
    """How context-parallel ranks compute attention: gather the keys and values of all ranks
    (allgather), or exchange positions for heads (a2a, https://arxiv.org/abs/2309.14509)."""
    expert_model_parallel_size: Annotated[int, AT_LEAST_ONE] = 1
    """Ranks that divide the experts. It divides tensor x context x data-parallel ranks, in this
    order, the tensor-parallel ranks first. Each rank has complete experts. Tokens travel to their
    experts and back. Keep these ranks inside one node if possible."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks shard (https://arxiv.org/abs/1910.02054): nothing (0), optimizer
    states (1), also gradients (2), also parameters (3)."""
    sharding_strategy: Literal["fsdp", "hsdp", "ddp"] | None = None
    """Another spelling of --zero-stage: fsdp is stage 3, ddp is stage 0 (each rank keeps the
    complete model). hsdp is stage 3 inside groups of ranks (--hsdp-shard-size), and each group
    keeps a copy of the model. Only gradients are sent between the groups."""
    hsdp_shard_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Data-parallel ranks that share one copy of the model. What --zero-stage shards is sharded
    inside such a group and replicated across the groups. Default: all data-parallel ranks. With
    --sharding-strategy hsdp: those of a node (LOCAL_WORLD_SIZE / tensor-parallel size)."""
    grad_reduce_in_bf16: bool = False
    """Send gradients between data-parallel ranks in bf16, which halves the traffic. They are still
    accumulated in fp32. Default: fp32. Needs --bf16."""
    check_invariants_interval: Annotated[int, NOT_NEGATIVE] = 1000
    """Check that copies of a parameter are equal on all ranks every this many iterations, at each
    start, and before each save. 0 turns all of these checks off."""
    sync_tp_duplicated_parameters: bool = False
    """Repair copies that drifted apart, instead of stopping. The copies of the first rank are
    kept."""
    replay_interval: Annotated[int, NOT_NEGATIVE] = 0
    """Compute the first microbatch of a step twice, every this many iterations, and compare what
    each rank computed, bit for bit. It finds devices that compute wrong numbers. 0: off."""
    replay_action: Literal["warn", "stop", "exclude"] = "warn"
    """What a difference between both does: a warning, the end of the run, or its end with a report
    by which the array task excludes the host."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Default: nccl if each rank has a GPU of its own, else gloo."""
    distributed_timeout_minutes: Annotated[float, POSITIVE] = 10.0
    """Minutes after which ranks that wait for an unresponsive rank end the run and name that rank
    (gloo). With nccl its watchdog ends the run. Reading and writing of files may take longer. With
    a number for --hang-timeout, messages time out only after the longest time that it allows."""
    hang_timeout: Annotated[float | Literal["auto", "off"], Range("(0, 1e9]")] = "auto"
    """When a run of several ranks counts as hanging. The ranks that the others wait for are then
    named, with their lines of code, and the run ends with code 1. auto: each part of a step may
    take three times as long as the slowest one of the last 100 steps, and 20 s more; a warning
    comes first, and the end after twice the time. A number: seconds for a training step or a batch
    of an evaluation, and ten times as long for everything else, also in a single process."""
    straggler_interval: Annotated[int, NOT_NEGATIVE] = 100
    """Iterations between two comparisons of how fast the ranks compute, without the time in which
    they wait for each other. The last ten iterations before it are measured. 0: off."""
    straggler_factor: Annotated[float, Range("(1, inf)")] = 1.5
    """A rank is reported as slow if its time is more than this many times the median of all
    ranks."""
    deepspeed: bool = False
    """Use DeepSpeed as the engine."""
    deepspeed_config: str | None = None
    """Path of DeepSpeed's JSON configuration."""
    # Some launchers pass -1 for "none".
    local_rank: Annotated[int | None, Range("[-1, inf)")] = None
    """Appended by old launchers. The environment's LOCAL_RANK is used if it is set."""

    @property
    def hang_seconds(self) -> float | None:
        """The seconds of `--hang-timeout`, if it is a number."""
        return self.hang_timeout if isinstance(self.hang_timeout, float) else None

    @property
    def is_watched(self) -> bool:
        """Whether a watchdog finds the rank that the others wait for."""
        return isinstance(self.hang_timeout, float) or IS_WATCHED[self.hang_timeout]

    @property
    def exchanges_heads(self) -> bool:
        """Whether there are context-parallel ranks that exchange positions for heads."""
        return EXCHANGES_HEADS[self.cp_comm_type] and self.context_parallel_size > 1

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold the model once."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def divides(self, world_size: int) -> bool:
        """Return whether a number of ranks can be divided into replicas."""
        return world_size >= 1 and world_size % self.replica_size == 0

    @property
    def length_unit(self) -> int:
        """What the length of a sequence must be a multiple of, so that ranks get equal parts.

        Context-parallel ranks have two equal parts each. With --sequence-parallel, the
        tensor-parallel ranks divide what a context-parallel rank has.
        """
        tensor = self.tensor_model_parallel_size if self.sequence_parallel else 1
        if self.context_parallel_size == 1:
            return tensor
        return self.context_parallel_size * math.lcm(2, tensor)
