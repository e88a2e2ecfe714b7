"""Rules that need the number of processes or derived numbers; those that the configuration alone can fail are in `config.rules`.

Invariant: a rule raises nothing; it adds what it found to the report, so that all failures come out together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megatron.config.asked import Asked
from megatron.config.fields import all_fields
from megatron.config.tree import Config
from megatron.errors import MegatronError
from megatron.model.shape import ModelShape
from megatron.schedule.batch_size import BatchSizeSchedule, ConstantBatchSize
from megatron.schedule.curriculum import Curriculum

T = TypeVar("T")

HEAD_DIM_MULTIPLE = 64
USUAL_HIDDEN_PER_LAYER = (32, 256)


@dataclass
class Report:
    """Collects what is wrong with a configuration, `asked`, as far as it can be derived from."""

    asked: Asked
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.asked.config

    def given(self, name: str, derived: int | None = None) -> str:
        """Flag, value and origin of the field with dotted `name`; `derived` is what an absent value amounts to."""
        if derived is not None and self.asked[name] is None:
            return f"{all_fields()[name].flag} {derived} (by default)"
        return self.asked.given(name)

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
    "tokenizer.make_vocab_size_divisible_by",
)


def countable(asked: Asked) -> Asked:
    """`asked` with each size below 1 replaced by 1, so that numbers can be derived; `config.rules` reports such sizes."""
    config = asked.config
    for name in COUNTS:
        group, leaf = name.split(".")
        if asked[name] is not None and asked[name] < 1:
            config = replace(config, **{group: replace(getattr(config, group), **{leaf: 1})})
    return Asked(config, asked.origin)


def alternatives(options: Sequence[object]) -> str:
    """'1, 2 or 4'."""
    words = [str(option) for option in options]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_grid(world_size: int, report: Report) -> bool:
    """Whether tensor x pipeline parallel size divides the number of processes."""
    parallel = report.config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    asked = f"{report.given('parallel.tensor_model_parallel_size')} x {report.given('parallel.pipeline_model_parallel_size')}"
    replica = tensor * pipeline
    if world_size < 1 or world_size % replica:
        fits = [n * replica for n in (world_size // replica, world_size // replica + 1) if n > 0]
        report.errors.append(
            f"{asked} = {replica} must divide the number of processes, {world_size}; start {alternatives(fits)} processes."
        )
        return False
    return True


def check_tensor_parallel(shape: ModelShape, report: Report) -> None:
    """Each tensor-parallel rank gets whole heads, whole query groups, and equal parts of the MLP and of a cut sequence."""
    model, tensor = report.config.model, report.config.parallel.tensor_model_parallel_size
    heads, groups, ffn = model.num_attention_heads, shape.query_groups, shape.ffn_hidden_size
    possible = [n for n in range(1, groups + 1) if heads % n == groups % n == ffn % n == 0]
    for name, number in (("num_attention_heads", heads), ("num_query_groups", groups), ("ffn_hidden_size", ffn)):
        follows_heads = name == "num_query_groups" and model.num_query_groups is None
        if number % tensor and not follows_heads:
            report.errors.append(
                f"{report.given('parallel.tensor_model_parallel_size')} must divide {report.given(f'model.{name}', number)}; "
                f"use {alternatives(possible)}."
            )
    if not report.config.parallel.sequence_parallel:
        return
    if tensor == 1:
        report.warnings.append("--sequence-parallel has no effect at --tensor-model-parallel-size 1.")
    elif model.seq_length % tensor:
        report.errors.append(
            f"{report.given('parallel.tensor_model_parallel_size')} must divide {report.given('model.seq_length')}, which "
            f"--sequence-parallel cuts over the tensor-parallel ranks; use a multiple of {tensor}, or no --sequence-parallel."
        )


def check_batch_sizes(schedule: BatchSizeSchedule, data_parallel_size: int, consumed_samples: int | None, report: Report) -> None:
    """Every batch size that is still to come must be divisible by micro-batch size x data-parallel size.

    Where the position is not known (`consumed_samples` None) and the very first size does not fit, the run cannot have begun on
    this number of processes: it is taken for a resume, and what does not fit is a warning, as long as the final size does.
    """
    config = report.config
    share = config.batch.micro_batch_size * data_parallel_size
    seq_length, start = config.model.seq_length, consumed_samples or 0
    sizes = list(schedule.upcoming(start, start * seq_length, seq_length))
    bad = [size for size in sizes if size % share]
    if not bad:
        return
    resumed = consumed_samples is None and bad[0] == sizes[0] and schedule.final % share == 0
    rule = f"must be divisible by {report.given('batch.micro_batch_size')} x data-parallel size {data_parallel_size} = {share}"
    if isinstance(schedule, ConstantBatchSize):
        low = bad[0] // share * share
        fits = alternatives([n for n in (low, low + share) if n > 0])
        report.errors.append(f"{report.given('batch.global_batch_size')} {rule}; use {fits}.")
        return
    name = "batch.rampup_batch_size" if config.batch.rampup_batch_size else "batch.step_batch_size_schedule"
    first = f"{report.given(name)}: batch size {bad[0]} {rule}"
    if resumed:
        report.warnings.append(
            f"{first}; this can only be a resume past batch size {bad[-1]}: a start from the first sample would be refused."
        )
    else:
        report.errors.append(
            f"{first}; it is the first of the coming sizes that is not. Choose sizes that are multiples of {share}."
        )


def check_curriculum(curriculum: Curriculum | None, report: Report) -> None:
    """What curriculum learning needs beside it: an end and a decay by tokens, one batch size, lengths that the model can take."""
    if curriculum is None:
        return
    config = report.config
    report.warnings += curriculum.warnings()
    if config.batch.rampup_batch_size or config.batch.step_batch_size_schedule:
        report.errors.append(
            "curriculum learning changes the tokens of a batch already: leave out --rampup-batch-size and "
            "--step-batch-size-schedule beside it."
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
            f"curriculum_learning: max_difficulty {curriculum.max_difficulty} must not exceed {report.given('model.seq_length')}."
        )
    tensor = config.parallel.tensor_model_parallel_size
    step = math.gcd(curriculum.difficulty_step or 0, curriculum.max_difficulty, *curriculum.difficulties)
    if config.parallel.sequence_parallel and tensor > 1 and step % tensor:
        report.errors.append(
            f"--sequence-parallel with curriculum learning: {report.given('parallel.tensor_model_parallel_size')} must divide "
            f"every sequence length, but they are multiples of {step} only."
        )


def warn_of_shape(shape: ModelShape, report: Report) -> None:
    """Shapes that train but are likely slow or a slip."""
    model = report.config.model
    h, layers = model.hidden_size, model.num_layers
    head, width = shape.head_dim, report.given("model.hidden_size")
    if head % HEAD_DIM_MULTIPLE:
        report.warnings.append(
            f"head size {head} (--kv-channels, or {width} / {report.given('model.num_attention_heads')}) is not a "
            f"multiple of {HEAD_DIM_MULTIPLE}: attention runs slower on GPUs."
        )
    if model.ffn_hidden_size is not None and model.glu_activation is None and model.ffn_hidden_size != 4 * h:
        report.warnings.append(
            f"{report.given('model.ffn_hidden_size')} is not 4 x {width} = {4 * h}; a value left over from another model makes a "
            "lopsided network of quite another size (a 104B run was 58B): check the number of parameters."
        )
    if model.ffn_hidden_size is None and model.glu_activation is not None:
        report.warnings.append(
            f"{report.given('model.glu_activation')} without --ffn-hidden-size takes 4 x hidden size in each of three matrices, "
            f"half as much again as a plain MLP; --ffn-hidden-size {round(h / 24) * 64 or 64} (8/3 x hidden size) equals that."
        )
    low, high = USUAL_HIDDEN_PER_LAYER
    if not low <= h / layers <= high:
        report.warnings.append(
            f"{width} / {report.given('model.num_layers')} = {h / layers:.0f} is an unusual ratio of "
            f"width to depth: {low} to {high} is common, large published models have 100 to 205."
        )


def warn_of_pipeline(
    layers_per_stage: tuple[int, ...], schedule: BatchSizeSchedule, data_parallel_size: int, report: Report
) -> None:
    """Uneven stages, and microbatches too few to fill the pipeline."""
    config, stages = report.config, len(layers_per_stage)
    if stages == 1:
        return
    if len(set(layers_per_stage)) > 1 and "embedding" not in (config.parallel.pp_partition_method or ""):
        report.warnings.append(
            f"{report.given('model.num_layers')} over {report.given('parallel.pipeline_model_parallel_size')} stages is uneven "
            f"({' '.join(map(str, layers_per_stage))}): the largest stage sets the pace."
        )
    share = config.batch.micro_batch_size * data_parallel_size
    seq_length = config.model.seq_length
    few = [size for size in schedule.upcoming(0, 0, seq_length) if share <= size < stages * share]
    if few:
        least = min(few) // share
        report.warnings.append(
            f"batch size {min(few)} makes {least} microbatches for {stages} pipeline stages: stages stand idle for "
            f"{(stages - 1) / (least + stages - 1):.0%} of the time at this size."
        )


def warn_of_files(report: Report) -> None:
    """Files that only the training machine need have."""
    parallel, data = report.config.parallel, report.config.data
    prefixes = data.data_path[1::2] if len(data.data_path) > 1 else data.data_path
    for prefix in prefixes:
        if not Path(f"{prefix}.idx").is_file():
            report.warnings.append(f"{report.given('data.data_path')}: {prefix}.idx is not on this machine.")
    if parallel.deepspeed and parallel.deepspeed_config and not Path(parallel.deepspeed_config).is_file():
        report.warnings.append(
            f"{report.given('parallel.deepspeed_config')} is not there: what it sets (curriculum, precision) is not in this plan."
        )
