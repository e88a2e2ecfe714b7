"""Connects the extras with the core: the builders of the parts of a run.

Each builder imports its package when it is called. A run then imports only what it uses, and
nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.base.errors import ConfigError
from megatron.config.cli import load_config
from megatron.config.config_with_origin import LoadedConfig
from megatron.config.normalise import normalise_flag
from megatron.engine.kind import EngineKind
from megatron.engine.native_kind import NATIVE
from megatron.run.parts import NO_PARTS, Parts

READ_BY_TRANSLATOR = {
    # Files of other trainers.
    *("--config", "--deepspeed", "--deepspeed-config"),
    # Flags of this trainer with values that mean something else in another one.
    *("--ademamix-beta3-warmup", "--ademamix-alpha-warmup", "--bos-token", "--eos-token"),
    *("--strip-tokens", "--eval-only"),
}
"""Flags that this trainer could read alone, but not always as they are meant."""

if TYPE_CHECKING:
    from megatron.config.checkpoint import CheckpointConfig
    from megatron.config.config_with_origin import ConfigWithOrigin
    from megatron.config.tree import Config
    from megatron.data.indexed import IndexedDataset
    from megatron.data.source_kind import SourceKind
    from megatron.model.gpt import GPT
    from megatron.observe.block_timer import BlockTimer
    from megatron.parallel.ranks import Ranks
    from megatron.parallel.roll_call import RollCall
    from megatron.plan.run_plan import Plan
    from megatron.rules.finding import Finding
    from megatron.run.parts import (
        EmissionsMeter,
        Exporter,
        GoodputReport,
        GuardKind,
        Printer,
        Profiling,
        RankComparison,
        RunTracker,
        Tasks,
    )


def load_command_line(argv: Sequence[str], prog: str) -> LoadedConfig:
    """Load a command line, with the flags of other trainers if their translator is installed.

    Raises:
        ConfigError: The command line has errors.
    """
    # Without a translator, such flags are unknown, and the error names the missing package.
    if not _has_extras():
        return load_config(argv, prog=prog)
    if not _may_mean_another(argv):
        # The tables of other trainers are not read if nothing needs them.
        try:
            return load_config(argv, prog=prog)
        except ConfigError:
            # What is unknown or wrong here may be right for another trainer.
            pass
    from megatron.extras.translators.translator import OtherTrainers

    return load_config(argv, prog=prog, translator=OtherTrainers())


def _may_mean_another(argv: Sequence[str]) -> bool:
    """Return whether a correct command line may have a meaning that only the translator knows."""
    flags = {normalise_flag(word.partition("=")[0]) for word in argv if word.startswith("-")}
    # A command line may begin with the name of a file.
    return bool(flags & READ_BY_TRANSLATOR) or not argv or not argv[0].startswith("-")


def choose_engine(config: Config) -> EngineKind:
    """Return the kind of engine that a configuration asks for. This imports no torch."""
    # Without the packages, `check_parts` refuses the flags.
    if not _has_extras():
        return NATIVE
    kind = NATIVE
    if config.parallel.deepspeed:
        from megatron.extras.deepspeed.kind import DEEPSPEED

        kind = DEEPSPEED
    elif config.precision.fp8_format is not None:
        from megatron.extras.float8.kind import FLOAT8

        kind = FLOAT8
    if not config.kernels.fusion_flags:
        return kind
    from megatron.extras.kernels.kind import add_kernels

    return add_kernels(kind, config.kernels)


def choose_parts(config: Config) -> Parts:
    """Return the engine of a configuration, and the builders of all parts that are installed.

    `check_parts` explains what is missing.
    """
    if not _has_extras():
        # With an engine, `check_parts` would take the one of the core for the one of --deepspeed.
        return NO_PARTS
    return replace(_ALL_PARTS, engine=choose_engine(config))


def _has_extras() -> bool:
    return importlib.util.find_spec("megatron.extras") is not None


def _build_exporter(config: CheckpointConfig, log: Printer, iteration: int) -> Exporter:
    from megatron.extras.convert.hf_export import HFExporter

    return HFExporter(config, log, iteration)


def _load_source(dataset_format: str) -> SourceKind:
    from megatron.extras.sources.kinds import SOURCE_KINDS

    return SOURCE_KINDS[dataset_format]


def _load_guard() -> GuardKind:
    from megatron.extras.guard.spike_response import SpikeGuardKind

    return SpikeGuardKind()


def _build_profiling(config: Config, rank: int, log: Printer) -> Profiling:
    from megatron.extras.profiling.profilers import Profilers

    return Profilers(config, rank, log)


def _build_stragglers(
    stages: Sequence[GPT], timer: BlockTimer, interval: int, factor: float
) -> RankComparison:
    from megatron.extras.stragglers import stragglers

    return stragglers.StragglerWatch(stages, timer, interval, factor)


def _load_watchdog(folder: str | None) -> Callable[..., RollCall]:
    from megatron.extras.watchdog.watchdog import Watchdog
    from megatron.run.leaving import report_hang

    path = None if folder is None else Path(folder)
    return functools.partial(Watchdog, folder=path, report=report_hang)


def open_indexed(prefix: str) -> IndexedDataset:
    """Return the data set at a path, or the one that a manifest describes.

    Raises:
        DataError: It is missing or damaged.
    """
    from megatron.data.indexed import IndexedDataset, is_manifest

    if not is_manifest(prefix):
        return IndexedDataset(prefix)
    from megatron.extras.corpus.joined import JoinedDataset

    return JoinedDataset(prefix)


def _prepare_tasks(plan: Plan, ranks: Ranks, log: Callable[[str], None]) -> Tasks:
    from megatron.extras.scoring.eval_tasks import prepare_tasks

    return prepare_tasks(plan, ranks, log)


def _check_trackers(settings: ConfigWithOrigin) -> Iterator[Finding]:
    if settings.config.logging.tracker:
        from megatron.extras.trackers.trackers import check_trackers_are_installed

        yield from check_trackers_are_installed(settings)


def _build_tracker(
    name: str, project: str, folder: Path, metrics: Path, log: Printer
) -> RunTracker:
    from megatron.extras.trackers.process import TrackerProcess

    return TrackerProcess(name, project, folder=folder, metrics=metrics, log=log)


def _start_emissions(folder: str, country_iso_code: str, log: Printer) -> EmissionsMeter:
    from megatron.extras.trackers import emissions

    return emissions.Emissions(folder, country_iso_code, log=log)


def _start_goodput(
    folder: Path, metrics: Path, first_start: Mapping[str, Any] | None
) -> GoodputReport:
    from megatron.extras.operations.chronicle import goodput_meter

    return goodput_meter.GoodputMeter(folder, metrics, first_start)


def _predict(plan: Plan, device_name: str) -> dict[str, Any]:
    from megatron.extras.planner.prediction import describe_prediction

    return describe_prediction(plan, device_name)


def _check_verification(settings: ConfigWithOrigin) -> Iterator[Finding]:
    if settings.config.logging.verification is not None:
        from megatron.extras.verify.kept_report import check_report

        yield from check_report(settings)


def _keep_verification(plan: Plan, log: Printer) -> dict[str, Any]:
    from megatron.extras.verify.kept_report import keep_verification

    return keep_verification(plan.config, plan.world_size, log)


_ALL_PARTS = Parts(
    build_exporter=_build_exporter,
    load_source=_load_source,
    open_indexed=open_indexed,
    load_guard=_load_guard,
    build_profiling=_build_profiling,
    build_stragglers=_build_stragglers,
    load_watchdog=_load_watchdog,
    prepare_tasks=_prepare_tasks,
    rules=(_check_trackers, _check_verification),
    build_tracker=_build_tracker,
    start_emissions=_start_emissions,
    start_goodput=_start_goodput,
    predict=_predict,
    keep_verification=_keep_verification,
)
