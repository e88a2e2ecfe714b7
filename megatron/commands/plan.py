"""Report what a training command would do before any machine is allocated.

    python tools/plan.py --world-size 384 --at 12695 31214 -- <arguments of pretrain_gpt.py>
    python tools/plan.py --world-size 8 --config run.yaml --lr 3e-4
    python tools/plan.py train/my-run/my-run.slurm
    python tools/plan.py --expand scripts/train.sh small 8

The report has the model size, the grid, batches, the end of training, memory, FLOPs, errors and
warnings.

A script is read as text and never run. With --expand, a contained shell carries out its assignments
and control flow. This shell runs no command and opens no file. Words after the script that do not
begin with '-' are the script's arguments.

Exit code 0 means that the plan has no errors. Exit code 2 means that it has errors.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.commands.double_dash import split_at_double_dash
from megatron.commands.run_tool import run_tool
from megatron.config.cli import load_config
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.without_effect import format_warnings, split_off_flags_without_effect
from megatron.data.epochs import (
    DatasetUse,
    describe_epochs,
    measure_training_data,
    warn_of_many_epochs,
)
from megatron.data.phases import PlannedPhase
from megatron.engine.support import list_unsupported
from megatron.errors import ConfigError, MegatronError
from megatron.launch_script import (
    SCRIPT_SUFFIXES,
    LaunchScript,
    expand_launch_script,
    parse_command,
    read_launch_script,
)
from megatron.model import flops
from megatron.model.partition import count_layers_per_rank, select_stages_of_rank
from megatron.plan import Plan, resolve
from megatron.plan_rules import replace_wrong_values
from megatron.plural import format_count
from megatron.preset_table import format_preset_table, is_preset_list_asked
from megatron.schedule.lr import LRSchedule
from megatron.schedule.pipeline import PipelineSchedule, choose_schedule
from megatron.schedule.progress import ForecastPoint

SHOWN_SIZES = 8
"""A ramp-up with more batch sizes than this is shortened in the report."""


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of this tool. All others belong to pretrain_gpt.py.

    The training arguments may follow '--' or be mixed with these. A .slurm, .sh or .yaml file may
    come first.
    """

    world_size: int | None = None
    """Number of processes (devices). Default: the number that the script or launcher asks for,
    otherwise the number that one replica of the model needs."""
    at: Annotated[tuple[int, ...], tyro.conf.arg(metavar="ITER ...")] = field(default=())
    """Iterations to forecast. For each one the report has samples, tokens, batch size and the
    learning rate of the iteration's log line."""
    consumed_samples: int | None = None
    """Number of samples that were consumed before the planned resume. Batch sizes of a ramp-up
    before this position need not fit the grid. Default: 0, or unknown if the command has --load."""
    expand: bool = False
    """Follow the branches, loops and functions of a script. Without it, the last assignment before
    the training command applies. No command runs, so values of $(...) stay unknown. If this system
    cannot contain the shell, the script is refused."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class CommandSource:
    """The training arguments, the world size found with them, and warnings about reading them.

    `documents` has the files that the script writes before it starts training, by name.
    """

    arguments: tuple[str, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    """Print the plan of `argv` (default: the command line) and return the exit code."""
    own, training = split_arguments(sys.argv[1:] if argv is None else argv)
    if is_preset_list_asked(training):
        print(format_preset_table())
        return 0
    options = tyro.cli(PlanArguments, args=own, prog="plan.py", description=__doc__)

    def work() -> int:
        try:
            return _plan(options, training)
        except MegatronError as failure:
            return _report_failure(failure, options, ())

    return run_tool(work)


def _report_failure(
    failure: MegatronError, options: PlanArguments, warnings: tuple[str, ...]
) -> int:
    """Print why there is no plan, after `warnings`, and return the exit code."""
    if options.json:
        # Programs read this output. They find the same keys whether or not the command line can
        # be planned.
        empty: dict[str, Any] = {
            "parameters": None,
            "data_parallel_size": None,
            "train_iters": None,
            "data_phases": [],
            "at": [],
            "warnings": list(warnings),
            "flags_without_effect": [],
        }
        # A ConfigError with several problems lists them one per line after a headline.
        head, *listed = str(failure).split("\n  - ")
        print(json.dumps({**empty, "errors": listed or [head]}, indent=1))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"error: {failure}", file=sys.stderr)
    return 2


def _plan(options: PlanArguments, training: list[str]) -> int:
    negative = [iteration for iteration in options.at if iteration < 0]
    if negative:
        raise ConfigError(
            f"--at {' '.join(map(str, negative))}: an iteration must be at least 0, the start."
        )
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size} must be at least 1.")
    source = read_source(training, expand=options.expand)
    with _write_documents(source) as paths:
        arguments = tuple(_rename_document(word, paths) for word in source.arguments)

        def show(text: str) -> str:
            """Return the text with the script's names of the documents."""
            for name, path in paths.items():
                text = text.replace(path, name)
            return text

        try:
            return _plan_source(options, replace(source, arguments=arguments), show)
        except MegatronError as failure:
            # A value that is not known in the script may be the cause, so its warnings are printed.
            return _report_failure(ConfigError(show(str(failure))), options, source.warnings)


@contextmanager
def _write_documents(source: CommandSource) -> Iterator[dict[str, str]]:
    """Write the documents that the arguments name to a temporary folder.

    Yields:
        The script's name of each document, and its path in the folder.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        paths: dict[str, str] = {}
        for number, (name, text) in enumerate(source.documents.items()):
            # Two documents may have one name in two folders.
            safe = re.sub(r"[^\w.-]|^\.+$", "_", Path(name).name)[-100:]
            path = Path(folder) / str(number) / (safe or "document")
            if any(name in (word, word.partition("=")[2]) for word in source.arguments):
                path.parent.mkdir()
                path.write_text(text, errors="surrogateescape")
                paths[name] = str(path)
        yield paths


def _rename_document(word: str, paths: Mapping[str, str]) -> str:
    flag, mark, value = word.partition("=")
    if mark and value in paths:
        return f"{flag}={paths[value]}"
    return paths.get(word, word)


def _plan_source(options: PlanArguments, source: CommandSource, show: Callable[[str], str]) -> int:
    loaded = load_config(list(source.arguments), prog="plan.py")
    parallel = loaded.config.parallel
    warnings = [*source.warnings, *loaded.warnings]
    world_size = options.world_size
    if world_size is None:
        world_size = source.world_size
    if world_size is None:
        world_size = max(
            1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        )
        warnings.append(
            "--world-size is not given: planned for one replica of the model, "
            f"{format_count(world_size, 'process', 'processes')}."
        )
    # With --load the position is only known at run time, because the checkpoint holds it.
    position = options.consumed_samples
    if position is None and loaded.config.checkpoint.load is None:
        position = 0
    plan = resolve(loaded.config, world_size, loaded.origin, consumed_samples=position)
    # Iteration 0 is the state before the first step, so it may be forecast.
    late = [iteration for iteration in options.at if iteration > plan.train_iters]
    if late:
        warnings.append(
            f"--at {' '.join(map(str, late))}: training has iterations 1 to {plan.train_iters}."
        )
    at = plan.forecast().predict(options.at)
    refused = list_unsupported(plan)
    if refused:
        warnings.append(f"planned here, but --deepspeed does not support it: {'; '.join(refused)}.")
    uses = find_training_data(plan)
    # The configuration and the plan may report the same warning. A dict keeps the order and drops
    # repetitions.
    warnings = [*warnings, *plan.warnings, *warn_of_many_epochs(uses)]
    warnings = list(dict.fromkeys(map(show, warnings)))
    plan = replace(plan, errors=tuple(map(show, plan.errors)))
    if plan.errors:
        # What is wrong is among the errors. The rest of the plan is shown with other values.
        usable = replace_wrong_values(ConfigWithOrigin(plan.config, loaded.origin))
        plan = replace(plan, config=usable.config)
    if options.json:
        print(json.dumps(build_json(plan, at, warnings, uses), indent=1))
    else:
        print("\n".join(format_plan(plan, at, warnings, uses)))
    if plan.errors:
        return 2
    return 0


def find_training_data(plan: Plan) -> list[DatasetUse]:
    """Return what the run reads of each training data set.

    The list is empty if a data set is damaged or not on this machine, or if the length of the run
    is not known.
    """
    if not plan.train_tokens:
        return []
    try:
        return measure_training_data(
            plan.config.data,
            plan.train_tokens,
            phases=plan.data_phases,
            samples=plan.train_samples,
        )
    except (MegatronError, OSError):
        # The plan warns of data that are missing here. Training reports those that are damaged.
        return []


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into this tool's own arguments and the training command's.

    Arguments are recognised by name. Everything after '--' belongs to the training command.
    """
    # tyro would refuse the training flags, so each word is assigned here.
    words, after = split_at_double_dash(argv)
    own: list[str] = []
    training: list[str] = []
    while words:
        word = words.pop(0)
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--json", "--no-json", "--help", "-h", "--expand", "--no-expand"):
            own.append(word)
        elif name in ("--world-size", "--consumed-samples"):
            # The value is attached with '=', or it is the next word.
            own.append(word)
            if "=" not in word:
                own += words[:1]
                words = words[1:]
        elif name == "--at":
            values = word.partition("=")[2].replace(",", " ").split()
            # `--at` takes any number of values. The first word that is no number ends them.
            # Negative numbers are taken too, so that the message about them names this flag.
            while words and re.fullmatch(r"-?\d[\d_]*", words[0]):
                values.append(words.pop(0))
            own += ["--at", *values]
        else:
            training.append(word)
    return own, training + (after or [])


def read_source(training: list[str], *, expand: bool = False) -> CommandSource:
    """Find the arguments of pretrain_gpt.py in a command line, a script or a YAML file.

    Args:
        training: The words of the command line that belong to the training command.
        expand: Follow the script's control flow in a contained shell.

    Raises:
        ConfigError: The file cannot be read or has no training command, the shell cannot be
            contained, or `expand` is set without a script.
    """
    if training and not training[0].startswith("-"):
        first = Path(training[0])
    else:
        first = None
    is_script = first is not None and first.suffix in SCRIPT_SUFFIXES
    if expand and not is_script:
        raise ConfigError(
            "--expand needs a script as the first argument, a file that ends in "
            f"{' or '.join(SCRIPT_SUFFIXES)}."
        )
    if first is not None and first.suffix in (".yaml", ".yml"):
        return CommandSource(("--config", *training), None)
    # Anything that is no file with a known suffix is part of the training command itself.
    if first is None or not is_script:
        return _build_source(parse_command(training), ())
    parameters = list(takewhile(lambda word: not word.startswith("-"), training[1:]))
    further = tuple(training[1 + len(parameters) :])
    if expand:
        found = expand_launch_script(first, parameters=parameters, environment=os.environ)
    else:
        found = read_launch_script(first, parameters=parameters or None, environment=os.environ)
    return _build_source(found, further, script=first, expanded=expand)


def _build_source(
    command: LaunchScript,
    further: tuple[str, ...],
    *,
    script: Path | None = None,
    expanded: bool = False,
) -> CommandSource:
    return CommandSource(
        (*_drop_flags(command.arguments, further), *further),
        command.world_size,
        tuple(_describe_unknown(command, script, expanded)),
        command.documents,
    )


def _drop_flags(arguments: Sequence[str], further: Sequence[str]) -> list[str]:
    """Return `arguments` without the flags that `further` gives again, and without their values.

    The script's value of such a flag may be unknown, as in `--lr $(...)`, which is not a number.
    """
    given = {_get_flag(word) for word in further if word.startswith("--")}
    kept: list[str] = []
    dropped = False
    for word in arguments:
        if word.startswith("--"):
            dropped = _get_flag(word) in given
        if not dropped:
            kept.append(word)
    return kept


def _get_flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _describe_unknown(command: LaunchScript, script: Path | None, expanded: bool) -> Iterator[str]:
    """Yield one warning for each kind of unknown value in the script. It says how to give them."""
    if command.unresolved:
        unset = ", ".join(f"${name}" for name in command.unresolved)
        first = command.unresolved[0]
        fate = "are empty, as in bash" if expanded else "stay as they are written"
        yield (
            f"variables without a value here {fate}: {unset}. Set them in the environment, as in "
            f"{first}=... megatron-plan {script}."
        )
    if command.parameters:
        names = ", ".join(f"${name}" for name in command.parameters)
        yield (
            f"{names}: the script needs arguments. Write them after its name: "
            f"megatron-plan {script} ARGUMENT ..."
        )
    if command.commands:
        yield (
            f"these need execution and stay as they are written: {', '.join(command.commands)}. "
            f"Give their flags again with a value: megatron-plan {script} --flag VALUE."
        )
    if command.branches and not expanded:
        names = ", ".join(command.branches)
        yield (
            f"the script sets {names} in a branch or a loop. This plan uses the last branch and "
            "the first pass of the loop. With --expand it follows the branches and loops."
        )


def build_json(
    plan: Plan, at: list[ForecastPoint], warnings: list[str], uses: Sequence[DatasetUse] = ()
) -> dict[str, Any]:
    """Return the plan as plain data. Memory is in bytes, and FLOPs are plain counts."""
    tokens = plan.config.model.seq_length
    shown = ["iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "lr"]
    if plan.lr_schedule.decoupled_max_lr is not None:
        shown.append("decoupled_lr")
    return {
        "parameters": plan.parameters,
        "parameters_per_rank": max(plan.stage_parameters),
        "world_size": plan.world_size,
        "data_parallel_size": plan.data_parallel_size,
        "layers_per_stage": list(plan.layers_per_stage),
        "parameters_by_pipeline_rank": list(plan.stage_parameters),
        "pipeline": [
            {
                "batch_size": size,
                "microbatches": made.microbatches,
                "schedule": made.name,
                "idle": made.bubble,
            }
            for size, made in list_first_and_final(plan)
        ],
        "padded_vocab_size": plan.padded_vocab_size,
        "train_iters": plan.train_iters,
        "train_samples": plan.train_samples,
        "train_tokens": plan.config.batch.train_tokens or plan.train_samples * tokens,
        "training_data": [
            {"prefix": use.prefix, "tokens": use.tokens, "epochs": use.epochs} for use in uses
        ],
        "data_phases": [build_phase_json(planned) for planned in plan.data_phases],
        "at": [{name: getattr(progress, name) for name in shown} for progress in at],
        "memory_bytes": estimate_memory(plan),
        "flops": compute_flops(plan),
        "errors": list(plan.errors),
        "warnings": warnings,
        "flags_without_effect": split_off_flags_without_effect(warnings)[1],
    }


def build_phase_json(planned: PlannedPhase) -> dict[str, Any]:
    """Return a phase of the training data as plain data."""
    phase = planned.phase
    return {
        "first_iteration": planned.first_iteration,
        "start_sample": planned.start_sample,
        "seed": phase.seed,
        "data_path": list(phase.data_path),
        "train_weighted_split_paths": list(phase.train_weighted_split_paths),
    }


def list_first_and_final(plan: Plan) -> list[tuple[int, PipelineSchedule]]:
    """Return the first and the final batch size that fit the grid, each with its pipeline schedule.

    The list is empty if no batch size fits.
    """
    share = plan.config.batch.micro_batch_size * plan.data_parallel_size
    sizes = plan.batch_size.iterate_upcoming(0, 0, plan.config.model.seq_length)
    # A ramp-up may start at a size that this grid cannot take, which is among the plan's errors.
    fitting = [size for size in sizes if share > 0 and size % share == 0]
    # `dict.fromkeys` drops the second entry if the first size is also the final one.
    return [
        (size, plan.choose_pipeline_schedule(size))
        for size in dict.fromkeys([*fitting[:1], *fitting[-1:]])
    ]


def get_recomputed_share(plan: Plan) -> Fraction:
    """Return the share of the layers that are recomputed.

    An invalid share is already among the plan's errors. All layers are assumed then, so that the
    rest of the plan can be reported.
    """
    try:
        return plan.config.recompute.recomputed_part
    except (ValueError, ZeroDivisionError):
        return Fraction(1)


def estimate_memory(plan: Plan) -> dict[str, Any]:
    """Estimate memory in bytes for the model and for the pipeline rank that needs most.

    The memory of parameters is listed by part and follows a rule of bytes per parameter.
    "activations" is the estimate for the configuration. "activations_kept" assumes no recomputation
    of layers, and "activations_recomputed" assumes that of all layers. "activations_with_scores"
    adds the attention scores to "activations_kept", unless --recompute-attention-core is given.
    """
    share = get_recomputed_share(plan)
    config = plan.config
    ranks = range(plan.pipeline_size)
    parts = [_compute_parameter_memory(plan, rank) for rank in ranks]
    # The first pipeline ranks hold more microbatches in flight, and the last one holds the logits.
    # So any rank may need most.
    needed = [parts[rank].total + estimate_activations(plan, rank, share) for rank in ranks]
    fullest = needed.index(max(needed))
    model = flops.estimate_parameter_memory(
        plan.parameters,
        half=_is_half(plan),
        state_bytes=flops.count_state_bytes(
            config.optimizer.optimizer,
            plan.parameters,
            config.model.num_layers * flops.count_layer_matrix_parameters(plan.shape),
        ),
    )
    return {
        "model": {**vars(model), "total": model.total},
        "pipeline_rank": fullest,
        "rank": {**vars(parts[fullest]), "total": parts[fullest].total},
        "activations": estimate_activations(plan, fullest, share),
        "activations_kept": estimate_activations(plan, fullest, Fraction(0)),
        "activations_with_scores": estimate_activations(
            plan, fullest, Fraction(0), scores_kept=not config.recompute.recompute_attention_core
        ),
        "activations_recomputed": estimate_activations(plan, fullest, Fraction(1)),
    }


def _is_half(plan: Plan) -> bool:
    return plan.config.precision.bf16 or plan.config.precision.fp16


def _compute_parameter_memory(plan: Plan, pipeline_rank: int) -> flops.ParameterMemory:
    parallel = plan.config.parallel
    parameters = plan.stage_parameters[pipeline_rank]
    layers = count_layers_per_rank(plan.stages, plan.pipeline_size)[pipeline_rank]
    matrices = flops.count_layer_matrix_parameters(plan.shape, parallel.tensor_model_parallel_size)
    return flops.estimate_parameter_memory_per_rank(
        parameters,
        half=_is_half(plan),
        data_parallel_size=plan.data_parallel_size,
        zero_stage=parallel.zero_stage,
        state_bytes=flops.count_state_bytes(
            plan.config.optimizer.optimizer, parameters, layers * matrices
        ),
    )


def _choose_final_schedule(plan: Plan) -> PipelineSchedule:
    """Return the schedule at the final batch size, rounded down to one that fits the grid."""
    # A plan with errors may have a size of 0. The errors are reported, and this estimate must not
    # fail.
    share = max(1, plan.config.batch.micro_batch_size * plan.data_parallel_size)
    return choose_schedule(
        max(1, plan.batch_size.final // share), plan.pipeline_size, plan.stages_per_rank
    )


def estimate_activations(
    plan: Plan, pipeline_rank: int, recomputed: Fraction, *, scores_kept: bool = False
) -> int:
    """Estimate the activation memory of one rank in bytes.

    It counts all microbatches in flight, one layer being recomputed, and the logits. Layers that
    are recomputed keep only their input.
    """
    parallel = plan.config.parallel
    micro = plan.config.batch.micro_batch_size
    # A plan with errors may have a size of 0 here as well.
    tensor = max(1, parallel.tensor_model_parallel_size)
    sharing = {
        "sequence_parallel": parallel.sequence_parallel,
        "half": _is_half(plan),
        "scores_kept": scores_kept,
    }
    stages = select_stages_of_rank(plan.stages, pipeline_rank, plan.pipeline_size)
    counts = [
        (len(stage.layers), flops.count_recomputed_layers(stage.layers, recomputed))
        for stage in stages
    ]
    # With virtual stages a rank has several stages, and a microbatch visits each of them.
    visits = [
        flops.estimate_stage_activation_bytes(
            plan.shape, micro, tensor, layers=layers, recomputed_layers=again, **sharing
        )
        for layers, again in counts
    ]
    # The stages of a rank may differ, so the mean of its visits is multiplied by the number in
    # flight.
    kept = (
        _choose_final_schedule(plan).count_in_flight(pipeline_rank)
        * sum(visits)
        // max(1, len(visits))
    )
    # While one layer is recomputed, its full activations exist next to the stored inputs.
    if any(again for _, again in counts):
        kept += flops.estimate_stage_activation_bytes(
            plan.shape, micro, tensor, layers=1, **sharing
        )
    # Only the last stage has the output projection, whose logits are [b, s, v/t].
    if any(stage.last for stage in stages):
        kept += flops.estimate_logits_bytes(plan.shape, micro, tensor)
    return kept


def compute_flops(plan: Plan) -> dict[str, int]:
    """Return FLOPs at the full sequence length and the final batch size.

    megatron/model/flops.py describes the two conventions.
    """
    shape = plan.shape
    recompute = get_recomputed_share(plan)
    per_token = flops.count_model_flops_per_token(shape)
    return {
        "model_per_token": per_token,
        "hardware_per_token": flops.count_hardware_flops_per_token(shape, recompute=recompute),
        "hardware_per_iteration": flops.count_iteration_flops(
            shape, plan.batch_size.final, recompute=recompute
        ),
        # A run that ends by --train-tokens may train fewer tokens than samples x sequence length.
        "model_whole_run": per_token
        * (plan.config.batch.train_tokens or plan.train_samples * shape.config.seq_length),
    }


def format_plan(
    plan: Plan, at: list[ForecastPoint], warnings: list[str], uses: Sequence[DatasetUse] = ()
) -> list[str]:
    """Format the plan for people, one line per entry."""
    lines = [
        *_format_model(plan),
        *_format_training(plan),
        *_format_phases(plan),
        *([_format_row("epochs", describe_epochs(uses))] if uses else []),
        *_format_memory(plan),
        *_format_flops(plan),
    ]
    if at:
        lines += [
            "",
            f"{'iteration':>10} {'samples':>14} {'tokens':>18} {'batch':>6} {'length':>7} "
            f"{'learning rate':>14}"
            + (f" {'decoupled':>10}" if plan.lr_schedule.decoupled_max_lr is not None else ""),
        ]
    lines += [
        f"{p.iteration:>10} {p.consumed_samples:>14,} {p.consumed_tokens:>18,} "
        f"{p.global_batch_size:>6} {p.seq_length:>7} "
        f"{p.lr:>14.3E}" + (f" {p.decoupled_lr:>10.3E}" if p.decoupled_lr is not None else "")
        for p in at
    ]
    lines += ["", *format_warnings(warnings)] if warnings else []
    # Errors come last, so that they are at the end of the terminal's output.
    lines += ["", *(f"error: {error}" for error in plan.errors)] if plan.errors else []
    return lines


def _format_row(label: str, text: str) -> str:
    return f"{label:<22}{text}"


def _format_model(plan: Plan) -> list[str]:
    parallel = plan.config.parallel
    fullest = max(plan.stage_parameters)
    return [
        _format_row(
            "parameters",
            f"{plan.parameters:,} with the padded vocabulary of {plan.padded_vocab_size:,} "
            f"({plan.vocab_size:,} real)",
        ),
        _format_row(
            "  on a rank",
            f"{fullest:,} at most (pipeline rank {plan.stage_parameters.index(fullest)}), "
            "before ZeRO",
        ),
        _format_row(
            "grid",
            f"{format_count(plan.world_size, 'process', 'processes')} = "
            f"{parallel.tensor_model_parallel_size} tensor x "
            f"{parallel.pipeline_model_parallel_size} pipeline x {plan.data_parallel_size} "
            f"data; ZeRO {parallel.zero_stage}",
        ),
        *_format_pipeline(plan),
        _format_row(
            "attention",
            f"{plan.config.model.num_attention_heads} heads of {plan.head_dim}, "
            f"{plan.num_query_groups} key/value groups",
        ),
        _format_row("feed-forward", f"{plan.ffn_hidden_size:,} wide"),
    ]


def _format_pipeline(plan: Plan) -> list[str]:
    """Format the stages of the pipeline. Return no line for a single stage."""
    if plan.pipeline_size == 1:
        return []
    if plan.stages_per_rank > 1:
        each = f", in {plan.stages_per_rank} virtual stages on each rank"
    else:
        each = ""
    millions = (f"{parameters / 1e6:,.1f}" for parameters in plan.stage_parameters)
    rows = [
        _format_row("layers by stage", _collapse_runs(map(str, plan.layers_per_stage)) + each),
        _format_row("  parameters, 10^6", f"{_collapse_runs(millions)} by pipeline rank"),
    ]
    return rows + [
        _format_row("", made.describe(size).removeprefix("pipeline: "))
        for size, made in list_first_and_final(plan)
    ]


def _collapse_runs(texts: Iterable[str]) -> str:
    """Join texts and count repetitions, as in '5, 10 x 6, 5'."""
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return ", ".join(text if length == 1 else f"{length} x {text}" for text, length in runs)


def _format_training(plan: Plan) -> list[str]:
    batch = plan.config.batch
    seq_length = plan.config.model.seq_length
    share = batch.micro_batch_size * plan.data_parallel_size
    sizes = [
        f"{size} ({size / share:g})" for size in plan.batch_size.iterate_upcoming(0, 0, seq_length)
    ]
    if len(sizes) > SHOWN_SIZES:
        # A ramp-up can have hundreds of sizes.
        sizes = [*sizes[:3], f"... {len(sizes) - 4} more ...", sizes[-1]]
    lines = [
        _format_row("batch (microbatches)", ", ".join(sizes)),
        _format_row("iterations", f"{plan.train_iters:,}"),
        _format_row("samples", f"{plan.train_samples:,} of {seq_length:,} tokens"),
        _format_row(
            "tokens",
            f"{plan.train_samples * seq_length:,}" + (" at most" if plan.curriculum else ""),
        ),
    ]
    if plan.curriculum is not None:
        lines.append(_format_row("sequence length", str(plan.curriculum)))
    if batch.train_tokens is not None:
        last = plan.forecast().find_iteration_reaching_tokens(batch.train_tokens, plan.train_iters)
        lines.append(
            _format_row(
                "ends by tokens",
                f"{batch.train_tokens:,} tokens or all samples, at iteration {last:,}",
            )
        )
    lines.append(_format_row("learning rate", _describe_schedule(plan.lr_schedule)))
    return lines


def _format_phases(plan: Plan) -> list[str]:
    """Format the phases of the training data, one in each line."""
    rows = []
    for number, planned in enumerate(plan.data_phases, 1):
        phase = planned.phase
        seed = plan.config.batch.seed if phase.seed is None else phase.seed
        data = " ".join(phase.data_path or phase.train_weighted_split_paths)
        rows.append(
            _format_row(
                f"data phase {number}",
                f"from iteration {planned.first_iteration:,} (sample {planned.start_sample:,}), "
                f"seed {seed}: {data}",
            )
        )
    return rows


def _describe_schedule(lr: LRSchedule) -> str:
    warmup = f"warm-up {lr.warmup_steps:,.0f} samples"
    if lr.warmup_init > 0:
        warmup += f" from {lr.warmup_init:g}"
    if lr.decay_tokens is None:
        end = f"{lr.decay_steps:,} samples"
    else:
        end = f"{lr.decay_tokens:,} tokens"
    text = f"{lr.max_lr:g} to {lr.min_lr:g}, {lr.style}, {warmup}, decay to {end}"
    if lr.style == "WSD":
        text += f", {lr.wsd_decay_style} over the last {lr.wsd_decay_steps:,}"
    if lr.decoupled_max_lr is not None:
        text += (
            f"; word embedding and output matrix: {lr.decoupled_max_lr:g} to "
            f"{lr.decoupled_min_lr:g}"
        )
    return text


_MEMORY_RULES = {
    "adam": "18 bytes a parameter (16 in fp32)",
    "ademamix": "22 bytes a parameter (20 in fp32)",
    "muon": "18 bytes a parameter (16 in fp32), and 4 less in the matrices of the layers",
}
"""Value of --optimizer -> the bytes of a parameter."""


def _format_memory(plan: Plan) -> list[str]:
    memory_bytes = estimate_memory(plan)
    # The figures of a rank are those of the rank that needs most.
    if plan.pipeline_size > 1:
        where = f"; pipeline rank {memory_bytes['pipeline_rank']} needs most"
    else:
        where = ""
    rule = f"by the rule of {_MEMORY_RULES[plan.config.optimizer.optimizer]}{where}"
    lines = [_format_row("memory, GB (10^9)", f"{'model':>12}{'a rank':>12}   {rule}")]
    for part in ("master_weights", "working_weights", "optimizer_states", "gradients", "total"):
        model = memory_bytes["model"][part] / 1e9
        rank = memory_bytes["rank"][part] / 1e9
        lines.append(_format_row(f"  {part.replace('_', ' ')}", f"{model:>12,.2f}{rank:>12,.2f}"))
    configured, kept, scores, again = (
        memory_bytes[key] / 1e9
        for key in (
            "activations",
            "activations_kept",
            "activations_with_scores",
            "activations_recomputed",
        )
    )
    if share := get_recomputed_share(plan):
        note = f"{_format_layer_share(share)} recomputed; {kept:,.2f} without recomputation"
    else:
        note = f"{scores:,.2f} without a flash kernel, {again:,.2f} with all layers recomputed"
    if plan.pipeline_size > 1:
        # The number in flight explains why an early stage needs more memory than a late one.
        visits = _choose_final_schedule(plan).count_in_flight(memory_bytes["pipeline_rank"])
        note += (
            f"; {visits} {'virtual stages' if plan.stages_per_rank > 1 else 'microbatches'} "
            "in flight"
        )
    return [*lines, _format_row("  activations", f"{'about':>12}{configured:>12,.2f}   ({note})")]


def _format_layer_share(share: Fraction) -> str:
    if share == 1:
        return "all layers"
    return f"{share} of the layers"


def _format_flops(plan: Plan) -> list[str]:
    counts = compute_flops(plan)
    share = get_recomputed_share(plan)
    if share:
        recomputation = f"{_format_layer_share(share)} recomputed"
    else:
        recomputation = "no recomputation"
    return [
        _format_row(
            "FLOPs a token",
            f"{counts['model_per_token']:.4e} model, {counts['hardware_per_token']:.4e} hardware",
        ),
        _format_row(
            "FLOPs an iteration",
            f"{counts['hardware_per_iteration']:.4e} hardware, {recomputation}",
        ),
        _format_row(
            "FLOPs of the run",
            f"{counts['model_whole_run']:.4e} model (forward and backward, causal attention "
            "counted as full)",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
