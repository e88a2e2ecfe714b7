"""Connects the extras with the core: builds the parts of a run.

Each method of `InstalledParts` imports its package when it is called. A run then imports only what
it uses, and nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.base.plain_text import is_url
from megatron.config.cli import load_config
from megatron.config.fields import LoadedConfig
from megatron.run.parts import (
    NO_PARTS,
    Exporter,
    GoodputReport,
    GuardKind,
    Parts,
    Printer,
    Profiling,
    RankComparison,
    Replay,
    Tasks,
)

if TYPE_CHECKING:
    from megatron.checkpoint.store import Store
    from megatron.config.checkpoint import CheckpointConfig
    from megatron.config.fields import ConfigWithOrigin
    from megatron.config.logging import LoggingConfig
    from megatron.config.tree import Config
    from megatron.data.indexed import IndexedDataset
    from megatron.data.source import SourceKind
    from megatron.engine.base import Engine
    from megatron.model.gpt import GPT
    from megatron.observe.report import Sink
    from megatron.observe.timers import BlockTimer
    from megatron.parallel.mesh import Mesh
    from megatron.parallel.ranks import Ranks
    from megatron.parallel.roll_call import RollCall
    from megatron.parallel.shard import TensorShard
    from megatron.plan.rules.finding import Finding
    from megatron.plan.run_plan import Plan
    from megatron.run.state import TrainState


def load_command_line(argv: Sequence[str], prog: str) -> LoadedConfig:
    """Load a command line, with the flags of other trainers if their translator is installed.

    Raises:
        ConfigError: The command line has errors.
    """
    # Without a translator, such flags are unknown, and the error names the missing package.
    if not _has_extras():
        return load_config(argv, prog=prog)
    from megatron.extras.interop.translators.translator import OtherTrainers

    return load_config(argv, prog=prog, translator=OtherTrainers())


def choose_parts(config: Config) -> Parts:
    """Return what builds the parts of a run: the extras, or without them the core alone.

    `Parts.find_missing` explains what is missing.
    """
    if not _has_extras():
        return NO_PARTS
    from megatron.extras.step.engines import choose_engine

    return InstalledParts(choose_engine(config))


def _has_extras() -> bool:
    return importlib.util.find_spec("megatron.extras") is not None


def open_indexed(prefix: str) -> IndexedDataset:
    """Return the data set at a path, or the one that a manifest describes.

    Raises:
        DataError: It is missing or damaged.
    """
    from megatron.data.indexed import IndexedDataset, is_manifest

    if is_manifest(prefix):
        from megatron.extras.preparation.corpus.joined import JoinedDataset

        found: IndexedDataset = JoinedDataset(prefix)
    else:
        found = IndexedDataset(prefix)
    if found.is_packed:
        from megatron.extras.samples.chat.packed import ConversationPacking

        found.packing = ConversationPacking()
    return found


@dataclass(frozen=True)
class InstalledParts(Parts):
    """Builds the parts that the flags ask for. `Parts` describes each method."""

    def find_missing(self, config: Config) -> Iterator[Finding]:
        """Yield nothing, because all parts are installed."""
        yield from ()

    def check_flags(self, settings: ConfigWithOrigin) -> Iterator[Finding]:
        """Check that the packages of trackers and the report of a verification exist."""
        logging = settings.config.logging
        if logging.tracker:
            from megatron.extras.watch.trackers.trackers import check_trackers_are_installed

            yield from check_trackers_are_installed(settings)
        if logging.verification is not None:
            from megatron.extras.planner.verify.report import check_report

            yield from check_report(settings)

    def load_source(self, dataset_format: str) -> SourceKind:
        """Load the kind of data of --dataset-format."""
        from megatron.extras.samples.kinds import SOURCE_KINDS

        return SOURCE_KINDS[dataset_format]

    def open_indexed(self, prefix: str) -> IndexedDataset:
        """Open an indexed data set, or the manifest of several."""
        return open_indexed(prefix)

    def build_store(self, config: CheckpointConfig, ranks: Ranks) -> Store:
        """Build the object store of an address."""
        if config.local_dir is None:
            return super().build_store(config, ranks)
        from megatron.extras.object_store.store import LoadedStore, ObjectStore

        if is_url(config.save or ""):
            return ObjectStore(config, ranks)
        return LoadedStore(config, ranks)

    def change_loaded(self, shards: Sequence[TensorShard], config: Config) -> None:
        """Change one weight of each matrix, with --rehearsal perturbed."""
        if config.checkpoint.rehearsal == "perturbed":
            from megatron.extras.operations.handover.run_parts import perturb

            perturb(shards, config.precision)

    def load_watchdog(self, folder: str | None) -> Callable[..., RollCall]:
        """Load the builder of the watchdog of --hang-timeout."""
        from megatron.extras.watch.watchdog.watchdog import Watchdog
        from megatron.run.leaving import report_hang

        path = None if folder is None else Path(folder)
        return functools.partial(Watchdog, folder=path, report=report_hang)

    def load_guard(self) -> GuardKind:
        """Load the guard of --spike-guard."""
        from megatron.extras.watch.guard.spike_response import SpikeGuardKind

        return SpikeGuardKind()

    def prepare_tasks(self, plan: Plan, ranks: Ranks, log: Printer) -> Tasks:
        """Prepare the tasks of --eval-tasks."""
        if not plan.config.batch.eval_tasks:
            return Tasks()
        from megatron.extras.inference.scoring.eval_tasks import prepare_tasks

        return prepare_tasks(plan, ranks, log)

    def build_exporter(self, plan: Plan, state: TrainState, mesh: Mesh, log: Printer) -> Exporter:
        """Build the exporter of --hf-export-interval on rank 0."""
        config = plan.config
        # An evaluation saves no checkpoint that could be exported.
        is_asked = config.checkpoint.hf_export_interval is not None and not config.batch.eval_only
        if mesh.rank != 0 or not is_asked:
            return Exporter()
        from megatron.extras.interop.convert.hf_export import HFExporter

        return HFExporter(config.checkpoint, log, state.iteration)

    def build_profiling(self, plan: Plan, mesh: Mesh, log: Printer) -> Profiling:
        """Build the recorder of --profile-iterations and --memory-snapshot."""
        logging = plan.config.logging
        if logging.profile_iterations is None and not logging.memory_snapshot:
            return Profiling()
        from megatron.extras.watch.profiler import Profilers

        return Profilers(plan.config, mesh.rank, log)

    def build_stragglers(
        self, plan: Plan, mesh: Mesh, stages: Sequence[GPT], timer: BlockTimer
    ) -> RankComparison:
        """Build the comparison of --straggler-interval. A single rank has no other to compare."""
        parallel = plan.config.parallel
        if mesh.grid.world_size == 1 or not parallel.straggler_interval:
            return RankComparison()
        from megatron.extras.watch.stragglers import StragglerWatch

        return StragglerWatch(stages, timer, parallel.straggler_interval, parallel.straggler_factor)

    def build_replay(self, plan: Plan, mesh: Mesh, engine: Engine, log: Printer) -> Replay:
        """Build the comparison of --replay-interval."""
        if not plan.config.parallel.replay_interval:
            return Replay()
        from megatron.extras.watch.replay import MicrobatchReplay

        return MicrobatchReplay(plan.config.parallel.replay_action, mesh, engine, log)

    def build_trackers(self, config: Config, metrics: Path, log: Printer) -> Sequence[Sink]:
        """Build what sends the numbers of the metrics file to the trackers of --tracker."""
        if not config.logging.tracker:
            return ()
        from megatron.extras.watch.trackers.process import Trackers

        return (Trackers(config, metrics, log),)

    def build_emissions(self, logging: LoggingConfig, log: Printer) -> Sequence[Sink]:
        """Start to measure energy and CO2 with --codecarbon-dir."""
        if logging.codecarbon_dir is None:
            return ()
        from megatron.extras.watch.trackers.emissions import Emissions

        return (Emissions(logging.codecarbon_dir, logging.codecarbon_country_iso_code, log=log),)

    def build_goodput(
        self, folder: Path, metrics: Path, log: Printer, *, is_first: bool
    ) -> GoodputReport:
        """Build the goodput of a run with --save."""
        from megatron.extras.operations.chronicle.goodput_meter import GoodputMeter

        return GoodputMeter(folder, metrics, log, is_first=is_first)

    def predict(self, plan: Plan, device_name: str) -> dict[str, Any]:
        """Predict the step of a plan on a device."""
        from megatron.extras.planner.prediction import describe_prediction

        return describe_prediction(plan, device_name)

    def describe_start(self, plan: Plan, device_name: str, log: Printer) -> dict[str, Any]:
        """Describe the installation, and keep the report of --verification with the run."""
        from megatron.extras.operations.handover.run_parts import describe_installation

        found = describe_installation(device_name)
        if plan.config.logging.verification is None:
            return found
        from megatron.extras.planner.verify.report import keep_verification

        return found | keep_verification(plan.config, plan.world_size, log)
