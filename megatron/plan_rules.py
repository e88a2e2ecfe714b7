"""Rules that need the number of processes or derived numbers; those that the configuration alone can fail are in `config.rules`.

Invariant: a rule raises nothing; it adds what it found to the report, so that all failures come out together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.tree import Config
from megatron.errors import MegatronError
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.schedule.batch_size import BatchSizeSchedule, ConstantBatchSize
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.pipeline import PipelineSchedule, choose_schedule

T = TypeVar("T")

HEAD_DIM_MULTIPLE = 64
USUAL_HIDDEN_PER_LAYER = (32, 256)
IDLE_WORTH_SAYING = 1 / 3  # a pipeline has about that with twice as many microbatches as stages


@dataclass
class PlanReport:
    """Collects what is wrong with a configuration, `asked`, as far as it can be derived from."""

    asked: ConfigWithOrigin
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.asked.config

    def describe(self, name: str, derived: int | None = None) -> str:
        """Flag, value and origin of the field with dotted `name`; `derived` is what an absent value amounts to."""
        if derived is not None and self.asked[name] is None:
            return f"{all_fields()[name].flag} {derived} (by default)"
        return self.asked.describe(name)

    def attempt(self, make: Callable[[], T], otherwise: T) -> T:
        """`make()`, or `otherwise` with the failure noted."""
        try:
            return make()
        except MegatronError as failure:
            self.errors.extend(str(failure).splitlines())
            return otherwise


COUNTS = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.seq_length",
    "model.ffn_hidden_size",
    "model.num_query_groups",
    "model.kv_channels",
    "model.max_position_embeddings",
    "batch.micro_batch_size",
    "batch.global_batch_size",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "tokenizer.make_vocab_size_divisible_by",
    "curriculum.curriculum_min_difficulty",
    "curriculum.curriculum_max_difficulty",
    "curriculum.curriculum_total_step",
    "curriculum.curriculum_difficulty_step",
    "curriculum.curriculum_root_degree",
)


def clamp_sizes(asked: ConfigWithOrigin) -> ConfigWithOrigin:
    """`asked` with each size below 1 replaced by 1, so that numbers can be derived; `config.rules` reports such sizes."""
    config = asked.config
    for name in COUNTS:
        group, leaf = name.split(".")
        if asked[name] is not None and asked[name] < 1:
            config = replace(config, **{group: replace(getattr(config, group), **{leaf: 1})})
    return ConfigWithOrigin(config, asked.origin)


def format_alternatives(options: Sequence[object]) -> str:
    """'1, 2 or 4'."""
    words = [str(option) for option in options]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_grid(world_size: int, report: PlanReport) -> bool:
    """Whether tensor x pipeline parallel size divides the number of processes."""
    parallel = report.config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    asked = f"{report.describe('parallel.tensor_model_parallel_size')} x {report.describe('parallel.pipeline_model_parallel_size')}"
    replica = tensor * pipeline
    if world_size < 1 or world_size % replica:
        fits = [n * replica for n in (world_size // replica, world_size // replica + 1) if n > 0]
        report.errors.append(
            f"{asked} = {replica} must divide the number of processes, {world_size}; start {format_alternatives(fits)} processes."
        )
        return False
    return True


def check_tensor_parallel(shape: ModelShape, report: PlanReport) -> None:
    """Each tensor-parallel rank gets whole heads, whole query groups, and equal parts of the MLP and of a cut sequence."""
    model, tensor = report.config.model, report.config.parallel.tensor_model_parallel_size
    heads, groups, ffn = model.num_attention_heads, shape.query_groups, shape.ffn_hidden_size
    possible = [n for n in range(1, groups + 1) if heads % n == groups % n == ffn % n == 0]
    for name, number in (
        ("num_attention_heads", heads),
        ("num_query_groups", groups),
        ("ffn_hidden_size", ffn),
    ):
        follows_heads = name == "num_query_groups" and model.num_query_groups is None
        if number % tensor and not follows_heads:
            report.errors.append(
                f"{report.describe('parallel.tensor_model_parallel_size')} must divide {report.describe(f'model.{name}', number)}; "
                f"use {format_alternatives(possible)}."
            )
    if report.config.recompute.partition_activations and tensor == 1:
        report.warnings.append(
            "--partition-activations has no effect at --tensor-model-parallel-size 1."
        )
    if not report.config.parallel.sequence_parallel:
        return
    if tensor == 1:
        report.warnings.append(
            "--sequence-parallel has no effect at --tensor-model-parallel-size 1."
        )
    elif model.seq_length % tensor:
        report.errors.append(
            f"{report.describe('parallel.tensor_model_parallel_size')} must divide {report.describe('model.seq_length')}, which "
            f"--sequence-parallel cuts over the tensor-parallel ranks; use a multiple of {tensor}, or no --sequence-parallel."
        )


def check_batch_sizes(
    schedule: BatchSizeSchedule,
    data_parallel_size: int,
    consumed_samples: int | None,
    report: PlanReport,
) -> None:
    """Every batch size that is still to come must be divisible by micro-batch size x data-parallel size.

    Where the position is not known (`consumed_samples` None) and the very first size does not fit, the run cannot have begun on
    this number of processes: it is taken for a resume, and what does not fit is a warning, as long as the final size does.
    """
    config = report.config
    share = config.batch.micro_batch_size * data_parallel_size
    seq_length, start = config.model.seq_length, consumed_samples or 0
    sizes = list(schedule.iterate_upcoming(start, start * seq_length, seq_length))
    bad = [size for size in sizes if size % share]
    if not bad:
        return
    resumed = consumed_samples is None and bad[0] == sizes[0] and schedule.final % share == 0
    rule = f"must be divisible by {report.describe('batch.micro_batch_size')} x data-parallel size {data_parallel_size} = {share}"
    if isinstance(schedule, ConstantBatchSize):
        low = bad[0] // share * share
        fits = format_alternatives([n for n in (low, low + share) if n > 0])
        report.errors.append(f"{report.describe('batch.global_batch_size')} {rule}; use {fits}.")
        return
    name = (
        "batch.rampup_batch_size"
        if config.batch.rampup_batch_size
        else "batch.step_batch_size_schedule"
    )
    first = f"{report.describe(name)}: batch size {bad[0]} {rule}"
    if resumed:
        report.warnings.append(
            f"{first}; this can only be a resume past batch size {bad[-1]}: a start from the first sample would be refused."
        )
    else:
        report.errors.append(
            f"{first}; it is the first of the coming sizes that is not. Choose sizes that are multiples of {share}."
        )


def check_curriculum(
    curriculum: Curriculum | None,
    schedule: BatchSizeSchedule,
    ahead: range,
    consumed_tokens: int,
    report: PlanReport,
) -> None:
    """What curriculum learning needs beside it: an end and a decay by tokens, one batch size, lengths that the model can take.

    `ahead`: the iterations that are still to come, as far as samples or iterations end them; lengths that lie behind do not matter.
    """
    if curriculum is None:
        return
    config = report.config
    report.warnings += curriculum.list_warnings()
    if config.batch.rampup_batch_size or config.batch.step_batch_size_schedule:
        report.errors.append(
            "curriculum learning changes the tokens of a batch already: leave out --rampup-batch-size and "
            "--step-batch-size-schedule beside it; tools/to_curriculum.py says what else changes."
        )
    missing = [
        flag
        for flag, value in (
            ("--train-tokens", config.batch.train_tokens),
            ("--lr-decay-tokens", config.optimizer.lr_decay_tokens),
        )
        if value is None
    ]
    if missing:
        report.errors.append(f"curriculum learning counts in tokens: give {' and '.join(missing)}.")
    if curriculum.max_difficulty > config.model.seq_length:
        report.errors.append(
            f"curriculum learning: max_difficulty {curriculum.max_difficulty} must not exceed {report.describe('model.seq_length')}."
        )
    if not ahead:
        return
    _check_cut_sequences(curriculum, ahead, report)
    if config.batch.train_tokens is not None and isinstance(schedule, ConstantBatchSize):
        _warn_of_curriculum_end(
            curriculum, schedule.size, ahead, config.batch.train_tokens - consumed_tokens, report
        )


def _check_cut_sequences(curriculum: Curriculum, ahead: range, report: PlanReport) -> None:
    """--sequence-parallel cuts each length that will be trained."""
    tensor = report.config.parallel.tensor_model_parallel_size
    if not report.config.parallel.sequence_parallel or tensor == 1:
        return
    for iteration, length in curriculum.iterate_stages(ahead[0], ahead[-1]):
        if length % tensor:
            report.errors.append(
                f"--sequence-parallel with curriculum learning: {report.describe('parallel.tensor_model_parallel_size')} must divide "
                f"every sequence length, but iteration {iteration} has {length}; make the lengths and their steps multiples of "
                f"{tensor}."
            )
            return


def _warn_of_curriculum_end(
    curriculum: Curriculum, batch_size: int, ahead: range, tokens: int, report: PlanReport
) -> None:
    """Tokens are to end the run, at the full length. `tokens`: those that are left, of batches of `batch_size` samples."""
    batch, full = report.config.batch, report.config.model.seq_length
    end = curriculum.find_iteration_reaching(tokens, batch_size, ahead[0], ahead[-1])
    if end is None:
        length_flag = (
            "batch.train_samples" if batch.train_samples is not None else "batch.train_iters"
        )
        report.warnings.append(
            f"curriculum learning: {report.describe(length_flag)} ends the run before {report.describe('batch.train_tokens')}, since "
            "short sequences make fewer tokens; give twice as much, and the tokens decide."
        )
    last = curriculum.get_seq_length(ahead[-1] if end is None else max(end, ahead[0]))
    if last < full:
        report.warnings.append(
            f"curriculum learning: it ends at sequences of {last} tokens and never reaches {report.describe('model.seq_length')}."
        )


def warn_of_shape(shape: ModelShape, report: PlanReport) -> None:
    """Shapes that train but are likely slow or a slip."""
    model = report.config.model
    h, layers = model.hidden_size, model.num_layers
    head, width = shape.head_dim, report.describe("model.hidden_size")
    if head % HEAD_DIM_MULTIPLE:
        report.warnings.append(
            f"head size {head} (--kv-channels, or {width} / {report.describe('model.num_attention_heads')}) is not a "
            f"multiple of {HEAD_DIM_MULTIPLE}: attention runs slower on GPUs."
        )
    if (
        model.ffn_hidden_size is not None
        and model.glu_activation is None
        and model.ffn_hidden_size != 4 * h
    ):
        report.warnings.append(
            f"{report.describe('model.ffn_hidden_size')} is not 4 x {width} = {4 * h}; a value left over from another model makes a "
            "lopsided network of quite another size (a 104B run was 58B): check the number of parameters."
        )
    if model.ffn_hidden_size is None and model.glu_activation is not None:
        report.warnings.append(
            f"{report.describe('model.glu_activation')} without --ffn-hidden-size takes 4 x hidden size in each of three matrices, "
            f"half as much again as a plain MLP; --ffn-hidden-size {round(h / 24) * 64 or 64} (8/3 x hidden size) equals that."
        )
    low, high = USUAL_HIDDEN_PER_LAYER
    if not low <= h / layers <= high:
        report.warnings.append(
            f"{width} / {report.describe('model.num_layers')} = {h / layers:.0f} is an unusual ratio of "
            f"width to depth: {low} to {high} is common, large published models have 100 to 205."
        )


def warn_of_pipeline(
    stages: Sequence[Stage],
    schedule: BatchSizeSchedule,
    data_parallel_size: int,
    report: PlanReport,
) -> None:
    """Uneven stages, microbatches too few to fill the pipeline or in no number that interleaving takes, ZeRO at a high price."""
    parallel = report.config.parallel
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1 or len(stages) == 1:
        return
    layers = [len(stage.layers) for stage in stages]
    if len(set(layers)) > 1 and "embedding" not in (parallel.pp_partition_method or ""):
        report.warnings.append(
            f"{report.describe('model.num_layers')} over {report.describe('parallel.pipeline_model_parallel_size')} stages is uneven "
            f"({' '.join(map(str, layers))}): the largest stage sets the pace."
        )
    if parallel.num_layers_per_virtual_pipeline_stage is not None and len(stages) == ranks:
        report.warnings.append(
            f"{report.describe('parallel.num_layers_per_virtual_pipeline_stage')} has no effect: those are all layers of a rank."
        )
    share = report.config.batch.micro_batch_size * data_parallel_size
    sizes = [
        size
        for size in schedule.iterate_upcoming(0, 0, report.config.model.seq_length)
        if size % share == 0
    ]
    _warn_of_schedules(
        [(size, choose_schedule(size // share, ranks, len(stages) // ranks)) for size in sizes],
        report,
    )
    if data_parallel_size > 1 and sizes and parallel.zero_stage >= 2:
        what = (
            "gathers the parameters anew" if parallel.zero_stage == 3 else "reduces the gradients"
        )
        report.warnings.append(
            f"{report.describe('parallel.zero_stage')} with {report.describe('parallel.pipeline_model_parallel_size')} {what} for every "
            f"microbatch, {sizes[-1] // share} times a step at batch size {sizes[-1]}; --zero-stage 1 communicates once."
        )


def _warn_of_schedules(by_size: list[tuple[int, PipelineSchedule]], report: PlanReport) -> None:
    """`by_size`: the batch sizes in samples that the run passes through, in order, each with its schedule."""
    idle = [(size, schedule) for size, schedule in by_size if schedule.bubble > IDLE_WORTH_SAYING]
    if idle:
        (first, schedule), (final, last) = idle[0], by_size[-1]
        later = (
            f", and for {100 * last.bubble:.0f} % at batch size {final}" if final != first else ""
        )
        advice = (
            "; larger batches, smaller micro-batches or fewer stages shorten that"
            if last.bubble > IDLE_WORTH_SAYING
            else ""
        )
        report.warnings.append(f"{schedule.describe(first)}{later}{advice}.")
    broken = [(size, schedule) for size, schedule in by_size if schedule.name == "looped BFS"]
    if broken:
        size, schedule = broken[0]
        ranks, rounds = schedule.ranks, schedule.microbatches // schedule.ranks
        report.warnings.append(
            f"{report.describe('parallel.num_layers_per_virtual_pipeline_stage')}: the {schedule.microbatches} microbatches of batch "
            f"size {size} do not divide into {rounds} equal rounds over {ranks} ranks, as interleaved 1F1B wants: looped BFS runs "
            f"them, and keeps the activations of all; batch sizes that make a multiple of {ranks} microbatches are free of that."
        )


def warn_of_files(report: PlanReport) -> None:
    """Files that only the training machine need have."""
    parallel, data = report.config.parallel, report.config.data
    prefixes = data.data_path[1::2] if len(data.data_path) > 1 else data.data_path
    for prefix in prefixes:
        if not Path(f"{prefix}.idx").is_file():
            report.warnings.append(
                f"{report.describe('data.data_path')}: {prefix}.idx is not on this machine."
            )
    if (
        parallel.deepspeed
        and parallel.deepspeed_config
        and not Path(parallel.deepspeed_config).is_file()
    ):
        report.warnings.append(
            f"{report.describe('parallel.deepspeed_config')} is not there: what it sets (curriculum, precision) is not in this plan."
        )
