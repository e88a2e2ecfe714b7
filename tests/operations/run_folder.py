"""A run's folder as training writes it, made without training.

It has real checkpoints without tensors, TensorBoard events, metrics, emissions and a log.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from observe.reports import make_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.lineage import Lineage, read_lineage
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.logging import LoggingConfig
from megatron.config.yaml_file import dump_yaml
from megatron.extras.interop.translators.translator import load_config
from megatron.observe.log_line import (
    format_loaded_checkpoint_line,
    format_saved_checkpoint_line,
    format_training_line,
    format_validation_line,
)
from megatron.observe.metrics import MetricsFile
from megatron.observe.report import EvaluationReport, IterationReport, LaunchStart
from megatron.observe.tensorboard import TensorBoard
from megatron.run.state import TrainState

STARTED = datetime(2026, 1, 31, 12, tzinfo=UTC)
"""Iteration i is done i minutes later."""
SEQ = 32
EMISSIONS = "timestamp,run_id,duration,emissions,cpu_model"


def report(
    iteration: int, *, samples: int | None = None, loss: float | None = None
) -> IterationReport:
    """Return the report of an iteration.

    The batch size is 4, and 8 after iteration 6. So the samples are not proportional to the
    iterations, and each step axis of a chart needs its own treatment.
    """
    if samples is None:
        samples = 4 * iteration + 4 * max(0, iteration - 6)
    if loss is None:
        loss = 10.0 / iteration
    return make_report(
        iteration=iteration,
        train_iters=20,
        consumed_samples=samples,
        consumed_tokens=samples * SEQ,
        global_batch_size=4 if iteration <= 6 else 8,
        seconds=60.0,
        samples_per_second=1.0,
        tokens_per_second=32.0,
        lm_loss=loss,
        grad_norm=1.0,
        gigaflops_without_embeddings=1.75 * samples,
        phase_seconds={"data-wait": 0.1},
    )


def digest_folder(folder: Path) -> dict[str, tuple[str, int]]:
    """Return digest and time of each file of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait for a condition, for at most two minutes."""
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end, "it does not become true"
        time.sleep(0.05)


class FakeRun:
    """Launches that append to the same files. Each saves and validates every 4 iterations."""

    def __init__(self, root: Path, aside: Path) -> None:
        self.root = root
        """The --save folder."""
        self.aside = aside
        """Folder of everything else."""
        self.tensorboard = aside / "tb"
        self.codecarbon = aside / "carbon"
        self.log = aside / "main_log.txt"
        self.metrics = root / "metrics.jsonl"
        aside.mkdir(parents=True, exist_ok=True)
        root.mkdir(parents=True, exist_ok=True)
        self.lineage: Lineage = ()
        """Lineage of the newest checkpoint. The next save continues it."""
        self._launches = 0
        self.flags: list[str] = []

    def config_yaml(self) -> str:
        sizes = (
            "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
            "--vocab-size 5000 --data-path data"
        )
        schedule = (
            "--micro-batch-size 2 --global-batch-size 4 --lr 2e-3 --min-lr 1e-4 "
            "--train-iters 20 --save-interval 4"
        )
        paths = [
            "--save",
            str(self.root),
            "--load",
            str(self.root),
            "--tensorboard-dir",
            str(self.tensorboard),
        ]
        argv = [
            *sizes.split(),
            *schedule.split(),
            *paths,
            "--codecarbon-dir",
            str(self.codecarbon),
            *self.flags,
        ]
        return dump_yaml(load_config(argv).config)

    def launch(
        self,
        first: int,
        last: int,
        *,
        skip_ranges: list[list[int]] | None = None,
        scale: float = 1.0,
    ) -> None:
        """Write what a launch of iterations `first` to `last` writes, and end as if it was killed.

        The name of its event file is one second later than that of the launch before.
        """
        self._launches += 1
        board = TensorBoard(LoggingConfig(tensorboard_dir=str(self.tensorboard)))
        metrics = MetricsFile(self.metrics)
        lines = [f"srun: launch {self._launches}"]
        if first > 1:
            lines.append(format_loaded_checkpoint_line(str(self.root), first - 1))
        metrics.write(LaunchStart(first - 1))
        for iteration in range(first, last + 1):
            self._iteration(iteration, board, metrics, lines, skip_ranges or [], scale)
        board.close()
        metrics.close()
        self._rename_events()
        self._set_times(first, last)
        with self.log.open("a") as log:
            log.write("\n".join(lines) + "\n")

    def _iteration(
        self,
        iteration: int,
        board: TensorBoard,
        metrics: MetricsFile,
        lines: list[str],
        skip_ranges: list[list[int]],
        scale: float,
    ) -> None:
        found = report(iteration, loss=scale * 10.0 / iteration)
        assert found.lm_loss is not None
        board.write(found)
        metrics.write(found)
        lines += [format_training_line(found), f"[rank 1] iteration {iteration} of nothing"]
        if iteration % 4 == 0:
            evaluation = EvaluationReport(at=found.axes, loss=found.lm_loss)
            board.write(evaluation)
            metrics.write(evaluation)
            lines.append(format_validation_line(iteration, found.lm_loss))
            self._emission(iteration)
            self.save(iteration, skip_ranges)
            lines.append(format_saved_checkpoint_line(iteration, str(self.root)))

    def save(self, iteration: int, skip_ranges: list[list[int]]) -> None:
        axes = vars(report(iteration).axes)
        state = TrainState(**axes, skip_ranges=skip_ranges)
        saver = Saver(self.root, lineage=self.lineage)
        saver.begin(
            CheckpointContents(
                iteration,
                {},
                state.to_json(),
                self.config_yaml(),
                layout=f"launch {self._launches}",
            ),
            [],
        )
        saver.complete()
        self.lineage = read_lineage(read_manifest(self.root / f"global_step{iteration}"))

    def back_to(self, iteration: int) -> None:
        """Go back as an operator does by hand: only the pointers change, and the records stay."""
        self.lineage = tuple(entry for entry in self.lineage if entry.iteration <= iteration)
        (self.root / "latest").write_text(f"global_step{iteration}")
        (self.root / "latest_checkpointed_iteration.txt").write_text(str(iteration))

    def _emission(self, iteration: int) -> None:
        path = self.codecarbon / "emissions.csv"
        self.codecarbon.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(EMISSIONS + "\n")
        local = (STARTED + timedelta(minutes=iteration)).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
        with path.open("a") as file:
            file.write(f'{local},run{self._launches},{60 * iteration},0.5,"a, b"\n')

    def _rename_events(self) -> None:
        for path in self.tensorboard.glob("events.out.tfevents.*"):
            if ".launch" not in path.name:
                time = 1769860000 + self._launches
                name = f"events.out.tfevents.{time}.host.launch{self._launches}"
                path.rename(path.with_name(name))

    def _set_times(self, first: int, last: int) -> None:
        """Rewrite the times of the metrics: iteration i is done i minutes after STARTED."""
        lines = self.metrics.read_text().splitlines()
        for number, line in enumerate(lines):
            record = json.loads(line)
            record["time"] = (STARTED + timedelta(minutes=record["iteration"])).isoformat(
                timespec="milliseconds"
            )
            lines[number] = json.dumps(record)
        self.metrics.write_text("\n".join(lines) + "\n")

    def copy(self, to: Path) -> "FakeRun":
        """Copy the run. Its checkpoints still have the old paths, so give the new ones by flags."""
        shutil.copytree(self.root, to / "run", symlinks=True)
        shutil.copytree(self.aside, to / "aside")
        return FakeRun(to / "run", to / "aside")

    def paths(self) -> dict[str, Any]:
        """Return the paths for a request, or with hyphens for a command line."""
        return {
            "main_log": str(self.log),
            "tensorboard_dir": str(self.tensorboard),
            "metrics_file": str(self.metrics),
        }


def charts(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the charts of all event files of a folder as TensorBoard reads them.

    The result maps each tag to its (step, value) pairs.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            found.setdefault(tag, []).extend(
                (point.step, point.value) for point in accumulator.Scalars(tag)
            )
    return found


def snapshot(*folders: Path) -> dict[str, bytes]:
    """Return all entries of folders, name -> content of the file, or target of the link."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = f"{folder.name}/{path.relative_to(folder)}"
            if path.is_symlink():
                found[name] = str(path.readlink()).encode()
            elif path.is_file():
                found[name] = path.read_bytes()
            else:
                found[name + "/"] = b""
    return found
