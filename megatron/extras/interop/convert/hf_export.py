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
from megatron.checkpoint.folder import UNFINISHED, list_saved_iterations, step_folder
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
        self._waiting: list[int] = self._list_unfinished(iteration)
        """Iterations of checkpoints to export after the present one, the oldest first."""
        self._process: subprocess.Popen[bytes] | None = None
        self._iteration = 0
        """Iteration that `_process` exports. 0 if there is none, as no run saves iteration 0."""

    def list_iterations_in_use(self) -> set[int]:
        """Return the iterations of the checkpoints that an export reads or will read.

        Any thread may call it.
        """
        # `poll` moves the one to the other. In this order, no checkpoint is missed meanwhile.
        return {*self._waiting, self._iteration} - {0}

    def record_checkpoint(self, iteration: int) -> None:
        """Export a checkpoint that is complete on the disk, if it is the first of its interval."""
        # Saves by --save-at or before an exit need not be at a multiple of the interval.
        due = is_due(self._interval, self._last, iteration)
        self._last = iteration
        if not due or step_folder(self._folder, iteration).exists():
            return
        if self._waiting:
            left_out = self._waiting.pop()
            self._remove_unfinished(left_out)
            self._log(
                f"warning: iteration {left_out} is not exported, because the export before it "
                "is still in progress; use a longer --hf-export-interval"
            )
        # The export writes into this folder. Until it has ended, the folder shows that it is due.
        with contextlib.suppress(OSError):
            self._name_unfinished(iteration).mkdir(parents=True, exist_ok=True)
        self._waiting.append(iteration)
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
        if self._waiting:
            self._iteration = self._waiting[0]
            del self._waiting[0]
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
        """End an export in progress. The next start of the run repeats it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._log(
                f"warning: the export of iteration {self._iteration} was ended with the run; the "
                f"next start of the run repeats it, or {self._describe_repetition()}"
            )
        self._waiting = []
        self._iteration = 0

    def _name_unfinished(self, iteration: int) -> Path:
        """Return the folder that an export of this iteration writes into."""
        out = step_folder(self._folder, iteration)
        return out.with_name(out.name + UNFINISHED)

    def _list_unfinished(self, start: int) -> list[int]:
        """Return the iterations whose export an earlier launch has not completed.

        Those after `start` are recorded again when they are trained again.
        """
        saved = [at for at in list_saved_iterations(self._root) if at <= start]
        return [at for at in saved if self._name_unfinished(at).is_dir()]

    def _remove_unfinished(self, iteration: int) -> None:
        """Remove the folder of an export that has failed or is left out. It is empty."""
        with contextlib.suppress(OSError):
            self._name_unfinished(iteration).rmdir()

    def _start(self) -> None:
        out = step_folder(self._folder, self._iteration)
        command = [
            *(sys.executable, "-m", "megatron.extras.interop.commands.convert_checkpoint", "to-hf"),
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
            # The next start would fail in the same way.
            self._remove_unfinished(self._iteration)
            self._log(
                f"warning: the export of iteration {self._iteration} failed (exit code {code}); "
                f"see {self._folder / LOG}"
            )
