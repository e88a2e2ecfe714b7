"""How the model is spread over devices.

Data parallelism uses the ranks that tensor and pipeline parallelism leave.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import NOT_NEGATIVE, POSITIVE, Range


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of parallelism, communication and the engine."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (https://arxiv.org/abs/1909.08053). Keep them inside
    one node."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are divided into."""
    pp_partition_method: str | None = None
    """How layers are divided into stages: uniform, parameters, or type:REGEX (as in
    'type:transformer|embedding')."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleave: each rank has several stages of this many layers
    (https://arxiv.org/abs/2104.04473). This shortens idle times and needs more communication.
    Default: one stage a rank."""
    sequence_parallel: bool = False
    """Shard the sequence over tensor-parallel ranks where activations are otherwise replicated
    (https://arxiv.org/abs/2205.05198)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks shard (https://arxiv.org/abs/1910.02054): optimizer states (1), also
    gradients (2), also parameters (3)."""
    check_invariants_interval: Annotated[int, NOT_NEGATIVE] = 1000
    """Check that copies of a parameter are equal on all ranks every this many iterations, at each
    start, and before each save. 0 turns all of these checks off."""
    sync_tp_duplicated_parameters: bool = False
    """Repair copies that drifted apart, instead of stopping. The copies of the first rank are
    kept."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Default: nccl if each rank has a GPU of its own, else gloo."""
    distributed_timeout_minutes: Annotated[float, POSITIVE] = 10.0
    """Minutes after which ranks that wait for an unresponsive rank end the run and name that rank
    (gloo). With nccl its watchdog ends the run. Reading and writing of files may take longer."""
    hang_timeout: Annotated[float | None, POSITIVE] = None
    """Seconds that a training step or a batch of an evaluation may take. Ten times as long are
    allowed for the first of its kind, the start, a load, a save and the index of the data. After
    that, the ranks that the others wait for are named, with their lines of code, and the run ends
    with code 1. Default: off."""
    deepspeed: bool = False
    """Use DeepSpeed as the engine."""
    deepspeed_config: str | None = None
    """Path of DeepSpeed's JSON configuration."""
    # Some launchers pass -1 for "none".
    local_rank: Annotated[int | None, Range("[-1, inf)")] = None
    """Appended by old launchers. The environment's LOCAL_RANK is used if it is set."""
