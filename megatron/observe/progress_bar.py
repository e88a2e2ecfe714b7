"""A progress bar for people at a terminal.

Invariant: all lines go through `log`, which moves the bar out of their way. A log line is therefore
never mixed with the bar.
"""

import sys
from typing import TextIO

from tqdm import tqdm

from megatron.base.plain_text import make_plain_lines
from megatron.observe.report import IterationReport, LaunchStart, ReportEvent, RunEvent, Sink


class ProgressBar(Sink):
    """Bar over the iterations of a run, for a terminal only."""

    def __init__(self, *, total: int, initial: int = 0, stream: TextIO | None = None) -> None:
        """Create the bar.

        Args:
            total: Iterations of the run.
            initial: Iterations that are done already.
            stream: Where to draw, by default stderr.
        """
        self._bar: tqdm[None] = tqdm(
            total=total,
            initial=initial,
            unit="it",
            file=stream or sys.stderr,
            dynamic_ncols=True,
        )

    def write(self, event: ReportEvent) -> None:
        """Advance the bar by the iterations of an event. The loss is shown at its end."""
        match event:
            case LaunchStart():
                self._update(event.iteration)
            case IterationReport():
                loss = event.dropped_loss if event.lm_loss is None else event.lm_loss
                self._update(1, f"loss {loss:.3f}")
            case RunEvent(kind="skip"):
                self._update(event.details["last"] - event.details["first"] + 1)

    def _update(self, iterations: int, note: str = "") -> None:
        # No refresh here, because the next line draws the bar anyway.
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(iterations)

    def log(self, line: str) -> None:
        """Print a line to stdout immediately, above the bar."""
        tqdm.write(make_plain_lines(line), file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
