"""Report what a training command would do before any machine is allocated.

    python tools/plan.py --world-size 384 --at 12695 31214 -- <arguments of pretrain_gpt.py>
    python tools/plan.py --world-size 8 --config run.yaml --lr 3e-4
    python tools/plan.py train/my-run/my-run.slurm
    python tools/plan.py scripts/train.sh --script-args "small 8"
    python tools/plan.py --dry-run --world-size 512 -- <arguments of pretrain_gpt.py>
    python tools/plan.py train/my-run/my-run.slurm --write-config run.yaml
    python tools/plan.py --search --world-size 64 --hardware h100 -- <arguments of pretrain_gpt.py>

The report has the model size, the grid, batches, the end of training, memory, FLOPs, communication,
the predicted time and cost, errors and warnings.

A contained shell carries out the assignments and the control flow of a script. This shell runs no
command and opens no file.

Exit code 0 means that the plan has no errors and fits in memory, or may fit. Exit code 2 means that
it has errors. Exit code 4 means that it does not fit, or that a search found no layout that fits.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError, combine_errors, leave_out_middle
from megatron.base.plain_text import format_count, print_line, print_to_stderr
from megatron.commands.parts import open_indexed
from megatron.config.fields import ConfigWithOrigin
from megatron.config.presets import wants_preset_list
from megatron.console.parse import parse_arguments
from megatron.console.preset_table import format_preset_table
from megatron.console.run_tool import run_tool
from megatron.data.epochs import DatasetUse, measure_training_data, warn_about_many_epochs
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_cost import build_cost_json, list_cost_rows, write_trace
from megatron.extras.planner.commands.plan_dry_run import (
    build_dry_run_json,
    format_dry_run,
    run_dry,
)
from megatron.extras.planner.commands.plan_report import build_json, format_plan
from megatron.extras.planner.commands.plan_search import (
    PlannedSearch,
    build_search_json,
    format_explanation,
    format_search,
    predict_explained,
    search_plan,
)
from megatron.extras.planner.commands.plan_source import (
    CommandSource,
    explain_errors,
    read_source,
    rename_document,
    split_arguments,
    write_config,
    write_documents,
)
from megatron.extras.planner.cost.goodput import CostOptions
from megatron.extras.planner.cost.hardware import Hardware, load_hardware
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.cost.step_prediction import UPDATE_BYTES, StepPrediction
from megatron.extras.planner.prediction import can_be_predicted, predict_plan
from megatron.extras.step.engines import choose_engine
from megatron.plan.resolve import resolve
from megatron.plan.rules.layout import WORLD_SIZE
from megatron.plan.rules.numbers import replace_wrong_values
from megatron.plan.run_plan import Plan
from megatron.schedule.position import ForecastPoint

_ASSUMED = {
    "ranks_per_node": 1,
    "search_devices": 1,
    "device_memory_gib": 1e-9,
    "usable_share": 1e-9,
    "expert_imbalance": 1,
    "failures_per_1000_node_days": 1e-9,
    "detection_minutes": 0,
    "restart_minutes": 1e-9,
    "spare_nodes": 0,
    "fewer_nodes": 1,
    "save_gb_per_second": 1e-9,
    "store_gb_per_second": 1e-9,
    "store_price": 0,
    "store_write_price": 0,
    "pue": 1e-9,
    "carbon_intensity": 1e-9,
}
"""What is assumed about the cluster -> its smallest value. Smaller or huge ones would overflow."""
_MOST_ASSUMED = 1e9
_MOST_FORECAST = 10_000_000
"""Iterations of a forecast. More of them would take minutes."""


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
    script_args: str = ""
    """Arguments of the script in one text, as in "8B 4 1e-5". Words after the script that do not
    begin with '-' are arguments too."""
    write_config: Path | None = None
    """Write the configuration to this new YAML file, with the origin of each value. It has only
    what differs from the defaults. pretrain_gpt.py --config FILE trains with it."""
    hardware: str | None = None
    """Kind of the devices and their cluster: v100-32g, a10, a100-40g, a100-80g (or a100),
    jean-zay-a100, h100, h100-96g, h100-pcie, h200, gh200, b200, l40s, rtx-3090, rtx-4090, cpu (no
    GPU), or a YAML file of your own (docs/planner.md). Default: cpu with --distributed-backend
    gloo, otherwise a100-80g."""
    device_memory_gib: float | None = None
    """Memory of a device in GiB (2^30 bytes), to report whether each rank fits. Default: that of
    --hardware."""
    usable_share: float | None = None
    """Share of this memory that a layout may need and still fit. Layouts above it may fit, and are
    listed after those that fit. Default: that of --hardware, 0.9."""
    expert_imbalance: float | None = None
    """Tokens for the experts of the fullest rank, in multiples of the mean of the ranks that divide
    them. The others wait for this rank. Default: 1, perfect balance, which no learned router
    has."""
    ranks_per_node: int | None = None
    """Ranks of a node. They share its fast links, and --sharding-strategy hsdp shards over them.
    Default: the ranks that the script starts on a node, otherwise those of --hardware."""
    json: bool = False
    """Print JSON instead of text."""
    dry_run: bool = False
    """Run one training step on fake GPUs, for a rank of each kind (first, middle and last stage,
    first and last data-parallel rank). The report then also has peak memory by kind, collectives,
    and where the host waits for the GPU. It needs a C++ compiler (docs/dry_run.md)."""
    dry_run_microbatches: int | None = None
    """Microbatches of the dry run. Default: the pipeline size plus 1, or plus 2 with ZeRO 2. Twice
    the pipeline size if its stages are interleaved. All of a step with looped BFS. The default is
    never more than a step has."""
    search: bool = False
    """Search all layouts of the model, the batch and the devices. Print the fastest that fit in
    memory, and where each loses time to the first one. Faster ones that may fit come last."""
    search_devices: int | None = None
    """Search the layouts of this number of devices that have the micro-batch of the command, for
    example after nodes were lost. The plan stays that of --world-size."""
    explain: str | None = None
    """Print why a layout is slower than the fastest one, as in
    tp=8,pp=6,micro-batch=2,recompute=full. The keys are tp, pp, cp, ep, micro-batch, virtual,
    zero and recompute. What is not given is as in the training command. Also searches."""
    allow_fp8: bool = False
    """Let the search propose float8 as well, on hardware with such products. It changes the numbers
    of a run. Also searches."""
    trace: Path | None = None
    """Write the predicted step as a trace for https://ui.perfetto.dev into this file."""
    cost: Annotated[CostOptions, tyro.conf.arg(name="")] = field(default_factory=CostOptions)


@dataclass(frozen=True)
class _Search:
    """What a search has found, and the layout of --explain."""

    found: PlannedSearch
    explained: StepPrediction | None


def main(argv: list[str] | None = None) -> int:
    """Print the plan of `argv` (default: the command line) and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    own, training = split_arguments(words, PlanArguments)
    if wants_preset_list(training):
        return run_tool(_print_presets)
    options = parse_arguments(PlanArguments, args=own, prog="plan.py", description=__doc__)

    def work() -> int:
        try:
            return _plan(options, training)
        except MegatronError as failure:
            return _report_failure(failure, options, None)

    return run_tool(work)


def _print_presets() -> int:
    """Print the table of all presets, and return the exit code."""
    print_line(format_preset_table())
    return exit_codes.SUCCESS


def _report_failure(
    failure: MegatronError, options: PlanArguments, source: CommandSource | None
) -> int:
    """Print why there is no plan of `source`, and return the exit code."""
    # A ConfigError with several problems lists them one per line after a headline.
    head, *listed = str(failure).split("\n  - ")
    errors = listed or [head]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if source is not None:
        errors = explain_errors(source, errors, PlanArguments)
        # A value that is not known in the script may be the cause, so its warnings are printed.
        warnings = tuple(warning for warning in source.warnings if warning not in errors)
        notes = source.notes
    if options.json:
        # Programs read this output. They find these keys whether or not there is a plan.
        empty: dict[str, Any] = {
            "parameters": None,
            "data_parallel_size": None,
            "train_iters": None,
            "data_phases": [],
            "at": [],
            "assumed": [],
            "notes": list(notes),
            "warnings": list(warnings),
            "flags_without_effect": [],
        }
        print_line(json.dumps({**empty, "errors": errors}, indent=1))
    for note in notes:
        print_to_stderr(f"note: {note}")
    for warning in warnings:
        print_to_stderr(f"warning: {warning}")
    print_to_stderr(f"error: {combine_errors(errors)}")
    return exit_codes.USER_ERROR


def _plan(options: PlanArguments, training: list[str]) -> int:
    negative = [iteration for iteration in options.at if iteration < 0]
    if negative:
        raise ConfigError(
            f"--at {' '.join(map(str, negative))}: an iteration must be at least 0, the start."
        )
    if max(options.at, default=0) > _MOST_FORECAST:
        raise ConfigError(
            f"--at {max(options.at)}: at most {_MOST_FORECAST:,} iterations are forecast, one "
            "after the other."
        )
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size} must be at least 1.")
    _check_numbers(options)
    source = read_source(training, script_args=options.script_args)
    with write_documents(source) as paths:
        arguments = tuple(rename_document(word, paths) for word in source.arguments)

        def show(text: str) -> str:
            """Return the text with the script's names of the documents."""
            for name, path in paths.items():
                text = text.replace(path, name)
            return text

        try:
            return _plan_source(options, replace(source, arguments=arguments), show)
        except MegatronError as failure:
            return _report_failure(ConfigError(show(str(failure))), options, source)


def _plan_source(options: PlanArguments, source: CommandSource, show: Callable[[str], str]) -> int:
    loaded = load_config(list(source.arguments), prog="plan.py")
    parallel = loaded.config.parallel
    warnings = [*source.warnings, *loaded.warnings]
    given_size = options.world_size or source.world_size
    if given_size is None:
        world_size = max(1, parallel.replica_size)
        warnings.append(
            "--world-size is not given: planned for one replica of the model, "
            f"{format_count(world_size, 'process', 'processes')}."
        )
    else:
        world_size = given_size
    hardware = _choose_hardware(options, source, parallel.distributed_backend == "gloo")
    # With --load the position is only known at run time, because the checkpoint holds it.
    position = options.consumed_samples
    if position is None and loaded.config.checkpoint.load is None:
        position = 0
    plan = resolve(
        loaded.config,
        world_size,
        {**loaded.origin, WORLD_SIZE: "--world-size"},
        consumed_samples=position,
        ranks_per_node=hardware.ranks_per_node,
    )
    # Iteration 0 is the state before the first step, so it may be forecast.
    late = [iteration for iteration in options.at if iteration > plan.train_iters]
    if late:
        warnings.append(
            f"--at {' '.join(map(str, late))}: training has iterations 1 to {plan.train_iters}."
        )
    if options.at and plan.train_seconds is not None:
        warnings.append(
            "--at: the learning rate of a run by --train-time follows its time, so the rates shown "
            "are those of its start."
        )
    at = plan.forecast().predict(options.at)
    kind = choose_engine(plan.config)
    refused = kind.list_unsupported(plan)
    if refused:
        warnings.append(
            f"planned here, but {kind.flag or kind.name} does not support it: {'; '.join(refused)}."
        )
    uses = find_training_data(plan)
    # The configuration and the plan may report the same warning. A dict keeps the order and drops
    # repetitions.
    warnings = [*warnings, *plan.warnings, *warn_about_many_epochs(uses)]
    warnings = list(dict.fromkeys(map(show, warnings)))
    errors = explain_errors(source, list(map(show, plan.errors)), PlanArguments)
    plan = replace(plan, errors=tuple(map(leave_out_middle, errors)))
    if plan.errors:
        # What is wrong is among the errors. The rest of the plan is shown with other values.
        usable = replace_wrong_values(ConfigWithOrigin(plan.config, loaded.origin))
        plan = replace(plan, config=usable.config)
    assumed = _list_assumptions(plan, given_size, source)
    notes = source.notes
    if options.write_config is not None and not plan.errors:
        digest = write_config(options.write_config, plan, loaded, source, show)
        notes = (
            *notes,
            f"{options.write_config} is written. Its configuration has the digest {digest}.",
        )
    # A failure to draw is printed in place of the report, so that --json prints one document.
    if not plan.errors and options.trace is not None:
        write_trace(predict_plan(plan, hardware), options.trace)
    search = _print_report(options, plan, at, warnings, assumed, uses, hardware, notes)
    return _choose_exit_code(plan, hardware, search)


def _choose_exit_code(plan: Plan, hardware: Hardware, search: _Search | None) -> int:
    """Return the exit code of a plan. A script that submits the job can stop by it.

    A search answers whether any layout fits, and not whether the given one does.
    """
    if plan.errors:
        return exit_codes.USER_ERROR
    fits = True
    if search is not None:
        fits = bool(search.found.result.fastest)
    elif can_be_predicted(plan, hardware):
        fits = predict_plan(plan, hardware).verdict is not Verdict.DOES_NOT_FIT
    if fits:
        return exit_codes.SUCCESS
    return exit_codes.DOES_NOT_FIT


def _list_assumptions(plan: Plan, world_size: int | None, source: CommandSource) -> list[str]:
    """Return what the numbers of a plan rest on, and neither the command nor a file gives."""
    assumed = []
    if plan.assumes_vocab_size or source.assumed_vocabulary == plan.vocab_size:
        assumed.append(f"a vocabulary of {plan.vocab_size:,} (--vocab-size)")
    if world_size is None:
        count = format_count(plan.world_size, "process", "processes")
        assumed.append(f"{count}, one replica of the model (--world-size)")
    parallel = plan.config.parallel
    file = parallel.deepspeed_config
    if parallel.deepspeed and file is not None and not Path(file).is_file():
        assumed.append(f"no precision and no sequence lengths in {file}")
    try:
        UPDATE_BYTES.require(plan.config.optimizer.optimizer)
    except ConfigError as absent:
        assumed.append(str(absent))
    return assumed


def _print_report(
    options: PlanArguments,
    plan: Plan,
    at: list[ForecastPoint],
    warnings: list[str],
    assumed: list[str],
    uses: list[DatasetUse],
    hardware: Hardware,
    notes: tuple[str, ...],
) -> _Search | None:
    """Print the plan, its predicted cost, and what the search and the dry run find.

    Returns:
        The search, if one is asked for.
    """
    # A plan with errors has no step that could be run.
    reports = []
    if options.dry_run and not plan.errors:
        reports = run_dry(plan, options.dry_run_microbatches, hardware.expert_imbalance)
    if options.json:
        report = build_json(plan, at, warnings, uses, hardware)
        report["assumed"] = assumed
        report["notes"] = list(notes)
        report["cost"] = build_cost_json(plan, hardware, options.cost)
        if options.dry_run:
            report["dry_run"] = build_dry_run_json(reports)
        search = _search(plan, options, hardware)
        if search is not None:
            report["search"] = build_search_json(search.found, search.explained)
        print_line(json.dumps(report, indent=1))
        return search
    lines = [f"note: {note}" for note in notes]
    # With --distributed-backend gloo, the default is the CPU that the run asks for.
    is_default = options.hardware is None and hardware.has_gpu
    predicted = list_cost_rows(plan, hardware, options.cost, is_default=is_default, assumed=assumed)
    lines += format_plan(plan, at, warnings, uses, hardware, predicted, assumed)
    search = _search(plan, options, hardware)
    lines += _format_search(search)
    if reports:
        lines += format_dry_run(plan, reports)
    print_line("\n".join(lines))
    return search


def _check_numbers(options: PlanArguments) -> None:
    """Raise ConfigError if an assumption about the cluster is out of its range."""
    given = vars(options) | vars(options.cost)
    for name, least in _ASSUMED.items():
        value = given[name]
        # A comparison with NaN is False.
        most = 1 if name.endswith("_share") else _MOST_ASSUMED
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} must be from {least:g} to {most:g}."
            )


def _search(plan: Plan, options: PlanArguments, hardware: Hardware) -> _Search | None:
    """Search if that is asked for."""
    asked = options.search or options.allow_fp8 or options.explain or options.search_devices
    if plan.errors or not asked:
        return None
    explained = None
    # Before the search, so that a mistake is reported without the wait for the search.
    if options.explain is not None:
        explained = predict_explained(options.explain, plan, hardware)
    found = search_plan(plan, hardware, allow_fp8=options.allow_fp8, devices=options.search_devices)
    return _Search(found, explained)


def _format_search(search: _Search | None) -> list[str]:
    """Return the lines of a search and of --explain."""
    if search is None:
        return []
    lines = ["", *format_search(search.found)]
    if search.explained is not None:
        lines += ["", *format_explanation(search.explained, search.found)]
    return lines


def _choose_hardware(options: PlanArguments, source: CommandSource, on_cpus: bool) -> Hardware:
    """Return the hardware, with the ranks of a node as given or as the script starts them."""
    hardware = load_hardware(options.hardware or ("cpu" if on_cpus else "a100-80g"))
    if options.device_memory_gib is not None:
        hardware = replace(hardware, memory_gib=options.device_memory_gib)
    if options.usable_share is not None:
        hardware = replace(hardware, usable_share=options.usable_share)
    if options.expert_imbalance is not None:
        hardware = replace(hardware, expert_imbalance=options.expert_imbalance)
    given = options.ranks_per_node or source.ranks_per_node
    return replace(hardware, ranks_per_node=given or hardware.ranks_per_node)


def find_training_data(plan: Plan) -> list[DatasetUse]:
    """Return what the run reads of each training data set.

    The list is empty if a data set is damaged or not on this machine, or if the length of the run
    is not known.
    """
    if not plan.train_tokens or plan.train_seconds is not None:
        return []
    try:
        return measure_training_data(
            plan.config.data,
            plan.train_tokens,
            open_indexed,
            phases=plan.data_phases,
            samples=plan.train_samples,
            seq_length=plan.config.model.seq_length,
        )
    except (MegatronError, OSError):
        # The plan warns of data that are missing here. Training reports those that are damaged.
        return []


if __name__ == "__main__":
    sys.exit(main())
