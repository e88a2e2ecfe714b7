"""Every number that is derived from the configuration.

A plan is data. `megatron.plan.resolve` derives it and applies the rules. The rank that has resolved
a plan sends it to the others as JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, assert_never, get_type_hints

from megatron.base.errors import LayoutError, combine_errors
from megatron.base.json_record import restore
from megatron.config.compare import load_yaml
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.data.phases import PlannedPhase
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
)
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule
from megatron.schedule.position import Forecast
from megatron.schedule.skip import SkipRange


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the configuration and the number of processes.

    If `errors` is not empty, numbers may be placeholders. `parameters` and `stage_parameters` count
    the padded vocabulary, as in published numbers. `stage_parameters` are those of one rank, by
    pipeline rank. `train_iters` and `train_samples` are the end by iterations or samples.
    --train-tokens may end the run earlier. With --train-time (`train_seconds`) both are FOREVER.
    """

    config: Config
    world_size: int
    data_parallel_size: int
    vocab_size: int
    padded_vocab_size: int
    shape: ModelShape
    parameters: int
    stages: tuple[Stage, ...]
    stage_parameters: tuple[int, ...]
    batch_size: BatchSizeSchedule
    train_iters: int
    train_samples: int
    lr_schedule: LRSchedule
    curriculum: Curriculum | None
    skip_ranges: tuple[SkipRange, ...]
    data_phases: tuple[PlannedPhase, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    train_seconds: float | None = None
    shard_size: int = 1
    """Data x context ranks that share one copy of the model. See `choose_shard_size`."""
    start_iteration: int = 0
    """Iterations before this launch. 0 with --finetune."""
    assumes_vocab_size: bool = False
    """Whether the vocabulary is a guess, because the tokenizer's files are not on this machine."""
    loss_mean_origin: str = "default"
    """Where --loss-mean came from. See `LoadedConfig.origin`."""
    kernel_reasons: Mapping[str, str] = field(default_factory=dict)
    """Setting of a kernel -> why it is on or off. Filled at the start. See `KernelChoice`."""

    @property
    def copies(self) -> int:
        """Number of groups of data x context ranks that each hold a copy of the model."""
        return self.weight_ranks // self.shard_size

    @property
    def grid(self) -> Grid:
        """The sizes of the axes that the ranks are divided along."""
        parallel = self.config.parallel
        return Grid(
            parallel.pipeline_model_parallel_size,
            self.data_parallel_size,
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
        )

    @property
    def weight_ranks(self) -> int:
        """Data x context ranks, which compute with the same weights."""
        return self.data_parallel_size * self.config.parallel.context_parallel_size

    @property
    def expert_size(self) -> int | None:
        """Ranks that divide the experts, or None for a model without experts."""
        if self.config.model.num_experts is None:
            return None
        return self.config.parallel.expert_model_parallel_size

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage that the engine runs. DeepSpeed runs stage 0 as stage 1.

        DeepSpeed's stage 0 is wrong in 16 bits. With tensor parallelism its norm is wrong, and its
        first step has no gradients. Under a pipeline in bf16 it is right (BF16_Optimizer), except
        that it sums gradients in bf16. Stage 1 is the same optimizer with fp32 sums.
        """
        parallel = self.config.parallel
        return max(1, parallel.zero_stage) if parallel.deepspeed else parallel.zero_stage

    @property
    def train_tokens(self) -> int:
        """Tokens that the run reads. A curriculum reads whole samples and truncates them."""
        tokens = self.train_samples * self.config.model.seq_length
        end = self.config.batch.train_tokens
        # With a curriculum, --train-tokens counts truncated samples, which are fewer than are read.
        if end is None or self.curriculum is not None:
            return tokens
        return min(end, tokens)

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline ranks of a replica."""
        return len(self.stage_parameters)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of transformer layers of each stage. Virtual stages are counted separately."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def stages_per_rank(self) -> int:
        """Virtual stages of each pipeline rank. It is 1 if stages are not interleaved."""
        # If partitioning failed, one placeholder stage is shared by all ranks.
        return max(1, len(self.stages) // self.pipeline_size)

    def can_mask_tokens(self, *, training: bool) -> bool:
        """Return whether the loss of some tokens may be left out.

        The goldfish loss leaves out none in an evaluation.
        """
        config = self.config
        return config.data.eod_mask_loss or (training and config.loss.goldfish_loss)

    def counts_tokens_of_step(self, *, training: bool) -> bool:
        """Return whether the loss is divided by the counted tokens of all ranks."""
        match self.config.loss.loss_mean:
            case "step":
                return self.can_mask_tokens(training=training)
            case "microbatch":
                return False
            case _:
                assert_never(self.config.loss.loss_mean)

    def describe_loss_mean(self) -> tuple[str, str] | None:
        """Return what the loss is the mean of, and why. None if no token can be masked."""
        if not self.can_mask_tokens(training=True):
            return None
        mean = {
            "step": "over all counted tokens of a step",
            "microbatch": "of microbatch means, which depends on the micro-batch size",
        }[self.config.loss.loss_mean]
        origin = self.loss_mean_origin
        if origin == "default":
            return mean, "the default of a new run"
        if origin.startswith("as in "):
            return mean, origin
        return mean, f"given by {origin}"

    def choose_pipeline_schedule(self, batch_size: int) -> PipelineSchedule:
        """Choose how a global batch of `batch_size` samples runs through the stages.

        Raises:
            LayoutError: See `get_num_microbatches`.
        """
        return choose_schedule(
            self.get_num_microbatches(batch_size), self.pipeline_size, self.stages_per_rank
        )

    def get_num_microbatches(self, batch_size: int) -> int:
        """Return the microbatches of one data-parallel rank for a global batch.

        Args:
            batch_size: Global batch size in samples.

        Raises:
            LayoutError: The batch cannot be divided evenly.
        """
        micro = self.config.batch.micro_batch_size
        share = micro * self.data_parallel_size
        if batch_size % share:
            raise LayoutError(
                f"batch size {batch_size} must be divisible by micro-batch size {micro} x "
                f"data-parallel size {self.data_parallel_size} = {share}; change the batch sizes "
                "or the number of processes."
            )
        return batch_size // share

    def get_seq_length(self, iteration: int) -> int:
        """Return the tokens of a training sample in `iteration` (1-based).

        Evaluation always uses the full length.
        """
        if self.curriculum is None:
            return self.config.model.seq_length
        return self.curriculum.get_seq_length(iteration)

    def forecast(self) -> Forecast:
        """Return a forecast of counters and learning rate for a run without interruptions."""
        seq_length = self.config.model.seq_length
        return Forecast(
            self.batch_size, self.lr_schedule, seq_length, self.curriculum, self.skip_ranges
        )

    def raise_on_errors(self) -> None:
        """Raise one ConfigError that lists all of `errors`, if there are any."""
        if self.errors:
            raise combine_errors(self.errors)


_BATCH_SIZES: dict[str, type[BatchSizeSchedule]] = {
    "constant": ConstantBatchSize,
    "rampup": RampupBatchSize,
    "steps": StepBatchSize,
}


def record_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan without errors as JSON."""
    record = {field.name: getattr(plan, field.name) for field in fields(plan)}
    # The shape consists of the configuration and the sizes of the vocabulary.
    del record["shape"]
    # A batch size of a class that is not in the table fails here, on rank 0.
    (kind,) = [name for name, kind in _BATCH_SIZES.items() if kind is type(plan.batch_size)]
    return record | {
        "config": dump_yaml(plan.config),
        "stages": [
            [stage.index, stage.layers.start, stage.layers.stop, stage.first, stage.last]
            for stage in plan.stages
        ],
        "batch_size": {"kind": kind, **asdict(plan.batch_size)},
        "lr_schedule": asdict(plan.lr_schedule),
        "curriculum": None if plan.curriculum is None else asdict(plan.curriculum),
        "data_phases": [asdict(planned) for planned in plan.data_phases],
    }


def restore_plan(record: dict[str, Any]) -> Plan:
    """Return the plan that `record_plan` recorded. Nothing is derived, and no file is read."""
    config = load_yaml(record["config"], fast=True)
    batch_size = dict(record["batch_size"])
    restored = {
        "config": config,
        "shape": ModelShape(config.model, record["vocab_size"], record["padded_vocab_size"]),
        "stages": tuple(
            Stage(index, range(start, stop), first=first, last=last)
            for index, start, stop, first, last in record["stages"]
        ),
        "batch_size": restore(_BATCH_SIZES[batch_size.pop("kind")], batch_size),
    }
    hints = get_type_hints(Plan)
    others = {name: restore(hints[name], record[name]) for name in record.keys() - restored.keys()}
    return Plan(**restored, **others)
