"""How the model is spread over devices. Data parallelism takes what tensor and pipeline parallelism leave."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (https://arxiv.org/abs/1909.08053). Keep it inside a node."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into."""
    pp_partition_method: str | None = None
    """How layers are cut into stages: uniform, parameters, or type:REGEX (as in 'type:transformer|embedding')."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleave: each rank has several stages of this many layers (https://arxiv.org/abs/2104.04473). Shorter idle times, more
    communication. Default: one stage a rank."""
    sequence_parallel: bool = False
    """Cut the sequence over tensor-parallel ranks where activations are replicated (https://arxiv.org/abs/2205.05198)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks shard (https://arxiv.org/abs/1910.02054): optimizer states (1), gradients (2), parameters (3)."""
    check_invariants_interval: int = 1000
    """Every so many iterations, at each start, and before each save, check that copies of a
    parameter are equal on all ranks; 0 turns all of these checks off."""
    sync_tp_duplicated_parameters: bool = False
    """Repair copies that drifted apart, instead of stopping: those of the first rank hold."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Default: nccl with GPUs, gloo without."""
    distributed_timeout_minutes: float = 10.0
    """A collective that takes longer ends the run with an error that names the rank."""
    deepspeed: bool = False
    """Use DeepSpeed as the engine."""
    deepspeed_config: str | None = None
    """DeepSpeed's JSON configuration."""
    local_rank: int | None = None
    """Appended by old launchers; the environment's LOCAL_RANK is used when it is there."""
