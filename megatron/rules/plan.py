"""Rules that need the number of processes or derived numbers.

Rules that need only the configuration are in `megatron.rules`.

Invariant: a rule raises nothing. It adds its findings to the report, so that all failures are
reported together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from megatron.base.errors import MegatronError
from megatron.base.plural import format_count
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.layer_choice import choose_layers
from megatron.config.profiling import parse_profile_iterations
from megatron.config.tree import Config
from megatron.config.url import is_url
from megatron.data.planned_phase import PlannedPhase
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.rules.model import LAYER_CHOICES
from megatron.schedule.batch_size import BatchSizeSchedule, ConstantBatchSize
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule

T = TypeVar("T")

# The attention kernels on GPUs are fastest for head sizes that are multiples of this.
HEAD_DIM_MULTIPLE = 64
USUAL_HIDDEN_PER_LAYER = (32, 256)
# A pipeline idles for about this share with twice as many microbatches as stages.
IDLE_WORTH_WARNING = 1 / 3


@dataclass
class PlanReport:
    """Collector of everything that is wrong with the configuration `asked`."""

    asked: ConfigWithOrigin
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The configuration that the rules read."""
        return self.asked.config

    def describe(self, name: str, derived: int | None = None) -> str:
        """Return flag, value and origin of a field.

        Args:
            name: Dotted name of the field.
            derived: The value that applies if the field is not given.
        """
        if derived is not None and self.asked[name] is None:
            return f"{all_fields()[name].flag} {derived} (by default)"
        return self.asked.describe(name)

    def attempt(self, make: Callable[[], T], otherwise: T) -> T:
        """Return `make()`. If it fails, note the failure and return `otherwise`."""
        try:
            return make()
        except MegatronError as failure:
            # An error may list several mistakes, one on each line.
            self.errors.extend(str(failure).splitlines())
            return otherwise


# Fields that divide or are divided by others. A value below 1 would end in a ZeroDivisionError, and
# a very large one in an OverflowError.
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
    "parallel.context_parallel_size",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.hsdp_shard_size",
    "tokenizer.vocab_size",
    "tokenizer.pad_vocab_size_to",
    "tokenizer.make_vocab_size_divisible_by",
    "curriculum.curriculum_min_difficulty",
    "curriculum.curriculum_max_difficulty",
    "curriculum.curriculum_total_step",
    "curriculum.curriculum_difficulty_step",
    "curriculum.curriculum_root_degree",
)


def replace_wrong_values(asked: ConfigWithOrigin) -> ConfigWithOrigin:
    """Return `asked` with values from which the numbers of a plan can be derived.

    A size out of its range becomes 1. A wrong choice of layers becomes None. Rules report both.
    """
    config = asked.config
    for name in COUNTS:
        # None is a size that is derived from others, so it needs no limit.
        if asked[name] is not None and not all_fields()[name].range.contains(asked[name]):
            config = _replace_field(config, name, 1)
    for name in LAYER_CHOICES:
        try:
            if asked[name] is not None:
                choose_layers(asked[name], config.model.num_layers)
        except ValueError:
            config = _replace_field(config, name, None)
    return ConfigWithOrigin(config, asked.origin)


def _replace_field(config: Config, dotted: str, value: Any) -> Config:
    """Return the configuration with another value of a field."""
    group, name = dotted.split(".")
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})


def format_alternatives(options: Sequence[object]) -> str:
    """Format a list of alternatives, as in '1, 2 or 4'."""
    words = [str(option) for option in options]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_grid(world_size: int, report: PlanReport) -> bool:
    """Return whether tensor x pipeline x context size divides the number of processes."""
    parallel = report.config.parallel
    tensor = parallel.tensor_model_parallel_size
    pipeline = parallel.pipeline_model_parallel_size
    asked = (
        f"{report.describe('parallel.tensor_model_parallel_size')} "
        f"x {report.describe('parallel.pipeline_model_parallel_size')}"
    )
    context = parallel.context_parallel_size
    if context > 1:
        asked += f" x {report.describe('parallel.context_parallel_size')}"
    replica = tensor * pipeline * context
    if world_size < 1 or world_size % replica:
        # The next smaller and the next larger number of processes that fit.
        fits = [n * replica for n in (world_size // replica, world_size // replica + 1) if n > 0]
        # A single process was probably started without a launcher.
        launcher = f" with torchrun --nproc-per-node {replica}" if world_size == 1 else ""
        report.errors.append(
            f"{asked} = {replica} must divide the number of processes, {world_size}; "
            f"start {format_alternatives(fits)} processes{launcher}."
        )
        return False
    return True


def choose_shard_size(data_parallel_size: int, ranks_per_node: int, report: PlanReport) -> int:
    """Return the number of data-parallel ranks that share one copy of the model.

    Context-parallel ranks have the same weights and other tokens, so they count as data-parallel
    ranks here.

    What the ZeRO stage shards is sharded over them. At stage 0 each rank has its own copy.

    Args:
        data_parallel_size: Number of data x context ranks.
        ranks_per_node: Ranks of a node.
        report: Receives an error if the ranks cannot be divided into such groups. Then all
            data-parallel ranks are returned.
    """
    parallel = report.config.parallel
    # DeepSpeed runs stage 0 as stage 1.
    if parallel.zero_stage == 0 and not parallel.deepspeed:
        return 1
    size = parallel.hsdp_shard_size
    match parallel.sharding_strategy:
        case _ if size is not None:
            asked = report.describe("parallel.hsdp_shard_size")
        case None | "ddp" | "fsdp":
            return data_parallel_size
        case "hsdp":
            tensor = parallel.tensor_model_parallel_size
            asked = (
                f"{report.describe('parallel.sharding_strategy')} on nodes of {ranks_per_node} "
                f"ranks with --tensor-model-parallel-size {tensor}"
            )
            if ranks_per_node % tensor or ranks_per_node == tensor > 1:
                report.errors.append(
                    f"{asked}: a node has no whole group of data-parallel ranks to shard over. "
                    "Give --hsdp-shard-size, or use --sharding-strategy fsdp."
                )
                return data_parallel_size
            # A run on a part of a node has one copy of the model.
            size = min(ranks_per_node // tensor, data_parallel_size)
        case _:
            assert_never(parallel.sharding_strategy)
    if data_parallel_size % size:
        fits = [n for n in range(2, data_parallel_size + 1) if data_parallel_size % n == 0]
        report.errors.append(
            f"{asked}: the group of {size} must divide the "
            f"{format_count(data_parallel_size, 'data-parallel rank')}; use "
            f"--hsdp-shard-size {format_alternatives(fits or [1])}."
        )
        return data_parallel_size
    return size


def check_tensor_parallel(shape: ModelShape, report: PlanReport) -> None:
    """Check that tensor-parallel ranks get equal parts.

    Each rank must get complete heads, complete query groups or a part of the heads of one group,
    and equal parts of the MLP and of a sharded sequence.
    """
    model = report.config.model
    tensor = report.config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    groups = shape.query_groups
    ffn = shape.ffn_hidden_size
    possible = [
        n
        for n in range(1, heads + 1)
        if heads % n == ffn % n == 0 and (groups % n == 0 or n % groups == 0)
    ]
    for name, number in (
        ("num_attention_heads", heads),
        ("ffn_hidden_size", ffn),
    ):
        if number % tensor:
            report.errors.append(
                f"{report.describe('parallel.tensor_model_parallel_size')} must "
                f"divide {report.describe(f'model.{name}', number)}; "
                f"use {format_alternatives(possible)}."
            )
    # Without grouped queries the groups are the heads. One message about them is enough.
    if groups % tensor and tensor % groups and model.num_query_groups is not None:
        report.errors.append(
            f"{report.describe('parallel.tensor_model_parallel_size')} must divide "
            f"{report.describe('model.num_query_groups')} or be a multiple of it; "
            f"use {format_alternatives(possible)}."
        )
    if groups < tensor and model.qk_norm == "full":
        report.errors.append(
            f"{report.describe('model.qk_norm')} needs a query group for each tensor-parallel "
            f"rank, but there are {groups} groups and {tensor} ranks; use a smaller "
            "--tensor-model-parallel-size."
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
            f"{report.describe('parallel.tensor_model_parallel_size')} must "
            f"divide {report.describe('model.seq_length')}, which --sequence-parallel shards over "
            f"the tensor-parallel ranks; use a multiple of {tensor}, or no --sequence-parallel."
        )


def check_context_parallel(report: PlanReport) -> None:
    """Check that context-parallel ranks get equal parts, and that all can be computed."""
    parallel = report.config.parallel
    model = report.config.model
    context = parallel.context_parallel_size
    asked = report.describe("parallel.context_parallel_size")
    if context == 1:
        return
    # Padding would change how many tokens count, so other lengths are refused.
    unit = parallel.length_unit
    if model.seq_length % unit:
        report.errors.append(
            f"{asked} cuts the sequence into {2 * context} equal parts"
            f"{' of whole tensor-parallel parts' if parallel.sequence_parallel else ''}, but "
            f"{report.describe('model.seq_length')} is no multiple of {unit}; use "
            f"{max(1, model.seq_length // unit) * unit}, or another size."
        )
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    # Each rank computes complete heads.
    if parallel.exchanges_heads and heads % context:
        report.errors.append(
            f"{report.describe('parallel.cp_comm_type')} gives each rank an equal share of the "
            f"{heads} heads of a tensor-parallel rank, but {asked} does not divide them; use "
            "--cp-comm-type allgather, which needs no number of heads."
        )
    # The kernel takes as many queries as keys.
    if report.config.kernels.use_varlen_attention:
        report.errors.append(
            f"{asked} computes each document by a call of its own; leave out "
            "--use-varlen-attention."
        )


def check_muon(shape: ModelShape, report: PlanReport) -> None:
    """Check that each tensor-parallel rank has its own rows of the fused projections.

    Muon's owners put whole matrices together from such rows.
    """
    tensor = report.config.parallel.tensor_model_parallel_size
    if report.config.optimizer.optimizer == "muon" and shape.query_groups < tensor:
        report.errors.append(
            f"{report.describe('optimizer.optimizer')} needs a query group for each "
            f"tensor-parallel rank, but there are {shape.query_groups} groups and {tensor} ranks; "
            "use a smaller --tensor-model-parallel-size, or --optimizer adam."
        )


def check_batch_sizes(
    schedule: BatchSizeSchedule,
    data_parallel_size: int,
    consumed_samples: int | None,
    report: PlanReport,
) -> None:
    """Check that every batch size still to come fits the ranks.

    A size must be divisible by micro-batch size x data-parallel size.

    The position may be unknown (`consumed_samples` is None). If the very first size does not fit
    then, the run cannot have started on this number of processes. It is assumed to be a resume.
    Sizes that do not fit are a warning in this case, provided that the final size fits.
    """
    config = report.config
    # Every data-parallel rank must get the same number of complete microbatches.
    share = config.batch.micro_batch_size * data_parallel_size
    seq_length = config.model.seq_length
    start = consumed_samples or 0
    sizes = list(schedule.iterate_upcoming(start, start * seq_length, seq_length))
    bad = [size for size in sizes if size % share]
    if not bad:
        return
    resumed = consumed_samples is None and bad[0] == sizes[0] and schedule.final % share == 0
    rule = (
        f"must be divisible by {report.describe('batch.micro_batch_size')} x data-parallel "
        f"size {data_parallel_size} = {share}"
    )
    if isinstance(schedule, ConstantBatchSize):
        # The largest size below and the smallest size above that fit.
        low = bad[0] // share * share
        fits = format_alternatives([n for n in (low, low + share) if n > 0])
        report.errors.append(f"{report.describe('batch.global_batch_size')} {rule}; use {fits}.")
        return
    if config.batch.rampup_batch_size:
        name = "batch.rampup_batch_size"
    else:
        name = "batch.step_batch_size_schedule"
    # One message about the first size is enough. A ramp-up may have hundreds of sizes.
    first = f"{report.describe(name)}: batch size {bad[0]} {rule}"
    if resumed:
        report.warnings.append(
            f"{first}; this can only be a resume past batch size {bad[-1]}: a start from the first "
            "sample would be refused. tools/plan.py --consumed-samples N plans from the "
            "checkpoint's position."
        )
    else:
        passed = ""
        if config.checkpoint.load is not None and consumed_samples is None:
            passed = (
                f" If the run of --load is past batch size {bad[-1]}, tools/plan.py "
                "--consumed-samples N plans from its position."
            )
        report.errors.append(
            f"{first}; it is the first size that does not fit. Choose sizes that are multiples of "
            f"{share}.{passed}"
        )


def check_curriculum(
    curriculum: Curriculum | None,
    schedule: BatchSizeSchedule,
    ahead: range,
    consumed_tokens: int,
    report: PlanReport,
) -> None:
    """Check the settings that curriculum learning needs.

    These are an end and a decay by tokens, one batch size, and lengths that the model supports.

    Args:
        curriculum: The curriculum, or None without one.
        schedule: The batch sizes.
        ahead: The iterations still to come, if samples or iterations end the run. Lengths before
            them do not matter.
        consumed_tokens: Tokens before the start.
        report: Receives the findings.
    """
    if curriculum is None:
        return
    config = report.config
    report.warnings += curriculum.list_warnings()
    if config.batch.rampup_batch_size or config.batch.step_batch_size_schedule:
        report.errors.append(
            "curriculum learning already changes the tokens of a batch: leave out "
            "--rampup-batch-size and --step-batch-size-schedule; tools/to_curriculum.py lists what "
            "else changes."
        )
    # The number of tokens in an iteration changes with the length. Iterations and samples are
    # therefore no measure of progress.
    missing = [
        flag
        for flag, value in (
            ("--train-tokens", config.batch.train_tokens),
            ("--lr-decay-tokens", config.optimizer.lr_decay_tokens),
        )
        if value is None and config.batch.train_time is None
    ]
    if missing:
        report.errors.append(f"curriculum learning counts in tokens: give {' and '.join(missing)}.")
    if curriculum.max_difficulty > config.model.seq_length:
        report.errors.append(
            f"curriculum learning: max_difficulty {curriculum.max_difficulty} must not "
            f"exceed {report.describe('model.seq_length')}."
        )
    if not ahead:
        return
    _check_cut_sequences(curriculum, ahead, report)
    if config.batch.train_tokens is not None and isinstance(schedule, ConstantBatchSize):
        _warn_of_curriculum_end(
            curriculum, schedule.size, ahead, config.batch.train_tokens - consumed_tokens, report
        )


def _check_cut_sequences(curriculum: Curriculum, ahead: range, report: PlanReport) -> None:
    """Check that the ranks that share a sequence can divide each length that will be trained."""
    parallel = report.config.parallel
    unit = parallel.length_unit
    if unit == 1:
        return
    for iteration, length in curriculum.iterate_stages(ahead[0], ahead[-1]):
        if length % unit == 0:
            continue
        if parallel.context_parallel_size == 1:
            cut = "--sequence-parallel"
            needs = f"{report.describe('parallel.tensor_model_parallel_size')} must divide"
        else:
            cut = report.describe("parallel.context_parallel_size")
            needs = f"{unit} must divide"
        report.errors.append(
            f"{cut} with curriculum learning: {needs} every sequence length, but iteration "
            f"{iteration} has {length}; make the lengths and their steps multiples of {unit}."
        )
        return


def _warn_of_curriculum_end(
    curriculum: Curriculum, batch_size: int, ahead: range, tokens: int, report: PlanReport
) -> None:
    """Warn if tokens do not end the run, or if it ends before the full length.

    Args:
        curriculum: The curriculum.
        batch_size: Samples of each batch.
        ahead: The iterations still to come.
        tokens: Tokens still to come.
        report: Receives the findings.
    """
    batch = report.config.batch
    full = report.config.model.seq_length
    # The number of iterations until the tokens are reached depends on the lengths in between.
    end = curriculum.find_iteration_reaching(tokens, batch_size, ahead[0], ahead[-1])
    if end is None:
        if batch.train_samples is not None:
            length_flag = "batch.train_samples"
        else:
            length_flag = "batch.train_iters"
        report.warnings.append(
            f"curriculum learning: {report.describe(length_flag)} ends the run "
            f"before {report.describe('batch.train_tokens')}, because short sequences have fewer "
            "tokens; double the former, so that the tokens end the run."
        )
    last = curriculum.get_seq_length(ahead[-1] if end is None else max(end, ahead[0]))
    if last < full:
        report.warnings.append(
            f"curriculum learning: the run ends at sequences of {last} tokens and never "
            f"reaches {report.describe('model.seq_length')}."
        )


def warn_of_shape(shape: ModelShape, report: PlanReport) -> None:
    """Warn of shapes that can be trained but are likely slow or a mistake."""
    model = report.config.model
    h = model.hidden_size
    layers = model.num_layers
    head = shape.head_dim
    width = report.describe("model.hidden_size")
    if head % HEAD_DIM_MULTIPLE:
        report.warnings.append(
            f"head size {head} (--kv-channels, or {width} "
            f"/ {report.describe('model.num_attention_heads')}) is not a multiple "
            f"of {HEAD_DIM_MULTIPLE}: attention runs slower on GPUs."
        )
    if (
        model.ffn_hidden_size is not None
        and model.glu_activation is None
        and model.ffn_hidden_size != 4 * h
        and not report.asked.is_from_preset("model.ffn_hidden_size")
    ):
        report.warnings.append(
            f"{report.describe('model.ffn_hidden_size')} is not 4 x {width} = {4 * h}; a value "
            "that is left from another model changes the size of the network (a 104B run was 58B): "
            "check the number of parameters."
        )
    if model.ffn_hidden_size is None and model.glu_activation is not None:
        report.warnings.append(
            f"{report.describe('model.glu_activation')} without --ffn-hidden-size uses 4 x hidden "
            "size in each of three matrices, 1.5 times the parameters of an MLP without a gate; "
            f"--ffn-hidden-size {round(h / 24) * 64 or 64} (8/3 x hidden size) has the same number."
        )
    # The bounds are wide. They find a digit too many or too few, and not unusual designs.
    low, high = USUAL_HIDDEN_PER_LAYER
    if not low <= h / layers <= high:
        report.warnings.append(
            f"{width} / {report.describe('model.num_layers')} = {h / layers:.0f} is an unusual "
            f"ratio of width to depth: {low} to {high} is common, large published models have 100 "
            "to 205."
        )


def warn_of_pipeline(
    stages: Sequence[Stage],
    schedule: BatchSizeSchedule,
    data_parallel_size: int,
    report: PlanReport,
) -> None:
    """Warn of pipelines that are slow.

    Stages may be uneven, and microbatches too few to fill the pipeline. Their number may not suit
    interleaving. ZeRO stages 2 and 3 communicate for every microbatch.
    """
    parallel = report.config.parallel
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1 or len(stages) == 1:
        return
    layers = [len(stage.layers) for stage in stages]
    # With "embedding" in the method, stages are uneven on purpose.
    if len(set(layers)) > 1 and "embedding" not in (parallel.pp_partition_method or ""):
        report.warnings.append(
            f"{report.describe('model.num_layers')} "
            f"over {report.describe('parallel.pipeline_model_parallel_size')} stages is uneven "
            f"({' '.join(map(str, layers))}): the largest stage determines the speed."
        )
    if parallel.num_layers_per_virtual_pipeline_stage is not None and len(stages) == ranks:
        report.warnings.append(
            f"{report.describe('parallel.num_layers_per_virtual_pipeline_stage')} has no effect: "
            "a rank has no more layers."
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
    # ZeRO stage 1 communicates once a step. Higher stages do so for every microbatch, and there are
    # many in a pipeline.
    if data_parallel_size > 1 and sizes and parallel.zero_stage >= 2:
        if parallel.zero_stage == 3:
            what = "gathers the parameters again"
        else:
            what = "reduces the gradients"
        report.warnings.append(
            f"{report.describe('parallel.zero_stage')} "
            f"with {report.describe('parallel.pipeline_model_parallel_size')} {what} for every "
            f"microbatch, {sizes[-1] // share} times a step at batch size {sizes[-1]}; "
            "--zero-stage 1 communicates once."
        )


def _warn_of_schedules(by_size: list[tuple[int, PipelineSchedule]], report: PlanReport) -> None:
    """Warn of schedules that idle for long or need much memory.

    Args:
        by_size: The batch sizes in samples of the run, in order, each with its schedule.
        report: Receives the findings.
    """
    # Batch sizes usually grow, so the first size that idles is usually the worst one.
    idle = [(size, schedule) for size, schedule in by_size if schedule.bubble > IDLE_WORTH_WARNING]
    if idle:
        (first, schedule), (final, last) = idle[0], by_size[-1]
        if final != first:
            later = f", and for {100 * last.bubble:.0f} % at batch size {final}"
        else:
            later = ""
        if last.bubble > IDLE_WORTH_WARNING:
            advice = "; larger batches, smaller micro-batches or fewer stages shorten that"
        else:
            advice = ""
        report.warnings.append(f"{schedule.describe(first)}{later}{advice}.")
    # Looped BFS is chosen where interleaved 1F1B is impossible. Its memory may exceed the device's.
    broken = [(size, schedule) for size, schedule in by_size if schedule.name == "looped BFS"]
    if broken:
        size, schedule = broken[0]
        ranks = schedule.ranks
        rounds = schedule.microbatches // schedule.ranks
        report.warnings.append(
            f"{report.describe('parallel.num_layers_per_virtual_pipeline_stage')}: "
            f"the {schedule.microbatches} microbatches of batch size {size} do not divide "
            f"into {rounds} equal rounds over {ranks} ranks, as interleaved 1F1B requires: looped "
            "BFS is used, and keeps the activations of all; choose batch sizes with a multiple "
            f"of {ranks} microbatches to avoid that."
        )


def check_profile(world_size: int, train_iters: int, report: PlanReport) -> None:
    """Check that the ranks of traces and memory snapshots exist, and the run reaches the trace."""
    config = report.config
    logging = config.logging
    if logging.profile_iterations is None and not logging.memory_snapshot:
        return
    if logging.profile_ranks and max(logging.profile_ranks) >= world_size > 0:
        report.errors.append(
            f"{report.describe('logging.profile_ranks')} names a rank that does not exist: there "
            f"are {world_size} processes, 0 to {world_size - 1}; give -1 for all of them."
        )
    # `megatron.rules` reports a range that cannot be read.
    iterations = report.attempt(lambda: parse_profile_iterations(config), None)
    if iterations is not None and iterations[0] > train_iters:
        report.warnings.append(
            f"{report.describe('logging.profile_iterations')} begins after the last iteration, "
            f"{train_iters}: no trace is written; choose earlier iterations."
        )


def warn_of_phases(phases: Sequence[PlannedPhase], train_iters: int, report: PlanReport) -> None:
    """Warn of phases that begin after the end of training."""
    for planned in phases[1:]:
        if planned.first_iteration > train_iters > 0:
            report.warnings.append(
                f"{planned.phase.origin}: the phase begins with iteration "
                f"{planned.first_iteration}, and training ends after iteration {train_iters}; its "
                "data are not read. Let it begin earlier, or remove it."
            )


def warn_of_files(report: PlanReport, phases: Sequence[PlannedPhase]) -> None:
    """Warn of files that are not on this machine. Only the training machine needs them."""
    parallel = report.config.parallel
    data = report.config.data
    named: list[tuple[str, tuple[str, ...]]] = [
        (report.describe("data.data_path"), data.data_path),
        *((f"{planned.phase.origin} data_path", planned.phase.data_path) for planned in phases),
    ]
    if data.dataset_format is not None:
        # A folder with files. It is listed when the run starts.
        named = []
        for folder in data.data_path:
            if not is_url(folder) and not Path(folder).exists():
                report.warnings.append(
                    f"{report.describe('data.data_path')}: {folder} is not on this machine."
                )
    if data.mock_data:
        named = []
    for where, values in named:
        # With several data sets the list alternates between weight and prefix.
        for prefix in values[1::2] if len(values) > 1 else values:
            if not Path(f"{prefix}.idx").is_file():
                report.warnings.append(f"{where}: {prefix}.idx is not on this machine.")
    if (
        parallel.deepspeed
        and parallel.deepspeed_config
        and not Path(parallel.deepspeed_config).is_file()
    ):
        report.warnings.append(
            f"{report.describe('parallel.deepspeed_config')} does not exist: what it sets "
            "(curriculum, precision) is not in this plan."
        )
