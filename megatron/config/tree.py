"""The complete configuration that a user asked for, frozen.

Derived numbers are in `megatron.plan`. State that changes during training is in `TrainState`.
"""

from dataclasses import dataclass, field

from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.curriculum import CurriculumConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.kernels import KernelsConfig
from megatron.config.logging import LoggingConfig
from megatron.config.loss import LossConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.spike_guard import SpikeGuardConfig


@dataclass(frozen=True)
class Config:
    """All groups of settings.

    Groups nest in YAML (`model: {hidden_size: 384}`). They are flat on the command line
    (`--hidden-size 384`).
    """

    # Only these two groups have required fields, so only they have no default.
    model: ModelConfig
    batch: BatchConfig
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guard: SpikeGuardConfig = field(default_factory=SpikeGuardConfig)
