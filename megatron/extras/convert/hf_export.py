"""Export of checkpoints to the format of Hugging Face while training continues.

Rank 0 starts `megatron-convert-checkpoint` as a process of its own. Training never waits for it,
except at the end of the run. A failure of an export is a warning.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.base.durable import without_links
from megatron.checkpoint.folder import step_folder
from megatron.config.checkpoint import CheckpointConfig
from megatron.run.parts import Exporter
from megatron.schedule.clock import is_due

FOLDER = "hf"
"""Folder in --save that has the exported models."""
LOG = "export.log"
_LOOK_SECONDS = 0.5
"""Seconds between two looks for a signal while the end of a run waits for an export."""
_END_SECONDS = 3600.0
"""Longest time that the end of a run waits for an export."""
_LOWER_PRIORITY = 10
"""Niceness of the export, so that training keeps its processor time."""
_LAUNCHER_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class HFExporter(Exporter):
    """Exports the checkpoints of a run, one at a time."""

    def __init__(
        self, config: CheckpointConfig, log: Callable[[str], None], iteration: int
    ) -> None:
        """Create an exporter without an export in progress.

        Args:
            config: The flags of checkpoints, with --save and --hf-export-interval.
            log: Prints a message.
            iteration: Iteration at which this launch starts. Earlier intervals are over.
        """
        assert config.save is not None, "a rule checks it"
        assert config.hf_export_interval is not None
        self._root = Path(config.save)
        self._folder = self._root / FOLDER
        self._interval = config.hf_export_interval
        self._log = log
        self._last = iteration
        """Iteration of the last checkpoint that was recorded, or at which this launch starts."""
        self._waiting: int | None = None
        """Iteration of the newest checkpoint to export after the present one."""
        self._process: subprocess.Popen[bytes] | None = None
        self._iteration = 0
        """Iteration that `_process` exports. 0 if there is none, as no run saves iteration 0."""

    def list_iterations_in_use(self) -> set[int]:
        """Return the iterations of the checkpoints that an export reads or will read.

        Any thread may call it.
        """
        # `poll` moves the one to the other. In this order, no checkpoint is missed meanwhile.
        return {self._waiting or 0, self._iteration} - {0}

    def record_checkpoint(self, iteration: int) -> None:
        """Export a checkpoint that is complete on the disk, if it is the first of its interval."""
        # Saves by --save-at or before an exit need not be at a multiple of the interval.
        due = is_due(self._interval, self._last, iteration)
        self._last = iteration
        if not due or step_folder(self._folder, iteration).exists():
            return
        if self._waiting is not None:
            self._log(
                f"warning: iteration {self._waiting} is not exported, because the export before it "
                "is still in progress; use a longer --hf-export-interval"
            )
        self._waiting = iteration
        self.poll()

    def poll(self) -> None:
        """Report an export that has ended, and start the next one. It returns immediately."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._report(code)
            self._process = None
            self._iteration = 0
        if self._waiting is not None:
            self._iteration = self._waiting
            self._waiting = None
            self._start()

    def finish(self, must_stop: Callable[[], bool]) -> None:
        """Wait for the exports that are due, at the end of a run. See `Exporter.finish`."""
        announced = 0
        end = time.monotonic() + _END_SECONDS
        self.poll()
        while self._process is not None:
            if announced != self._iteration:
                announced = self._iteration
                end = time.monotonic() + _END_SECONDS
                self._log(f"waiting for the export of iteration {announced}")
            if must_stop() or time.monotonic() > end:
                self.stop()
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)
            self.poll()

    def stop(self) -> None:
        """End an export in progress. A later export of the iteration replaces what it wrote."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._log(
                f"warning: the export of iteration {self._iteration} was ended with the run; "
                f"{self._describe_repetition()}"
            )
        self._waiting = None
        self._iteration = 0

    def _start(self) -> None:
        out = step_folder(self._folder, self._iteration)
        command = [
            *(sys.executable, "-m", "megatron.commands.convert_checkpoint", "to-hf"),
            *("--load", str(self._root), "--iteration", str(self._iteration), "--out", str(out)),
        ]
        # The launcher's variables would make it a rank of this run, and the GPUs are in use.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_LAUNCHER_PREFIXES)
        } | {"CUDA_VISIBLE_DEVICES": ""}
        try:
            self._folder.mkdir(exist_ok=True)
            with open(self._folder / LOG, "ab", opener=without_links) as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL
                )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWER_PRIORITY)
        except OSError as error:
            # The process may have ended already, so it has no priority to change.
            if self._process is None:
                self._log(
                    f"warning: iteration {self._iteration} is not exported: {error}; "
                    f"{self._describe_repetition()}"
                )
                self._iteration = 0

    def _describe_repetition(self) -> str:
        """Return the end of a warning: how to export the present iteration by hand."""
        return (
            f"repeat it with tools/convert_checkpoint.py to-hf --load {self._root} "
            f"--iteration {self._iteration} --out FOLDER"
        )

    def _report(self, code: int) -> None:
        if code == 0:
            out = step_folder(self._folder, self._iteration)
            self._log(f"exported iteration {self._iteration} to {out}")
        else:
            self._log(
                f"warning: the export of iteration {self._iteration} failed (exit code {code}); "
                f"see {self._folder / LOG}"
            )
