"""A progress bar for people at a terminal, nothing for log files.

Invariant: lines go through `say`, which lifts the bar out of their way, so that a log line is never mixed with it.
"""

import sys
from typing import TextIO

from tqdm import tqdm


class ProgressBar:
    """Bar over the iterations of a run; draws only if `show` and `stream` is a terminal, and is silent otherwise."""

    def __init__(
        self, *, total: int, initial: int = 0, show: bool, stream: TextIO | None = None
    ) -> None:
        """`stream` is stderr by default."""
        stream = sys.stderr if stream is None else stream
        self._bar: tqdm[None] | None = None
        if show and stream.isatty():
            self._bar = tqdm(
                total=total, initial=initial, unit="it", file=stream, dynamic_ncols=True
            )

    def update(self, iterations: int = 1, note: str = "") -> None:
        """Go on by so many iterations; `note` (as in 'loss 3.21') stands at the bar's end."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(iterations)

    def say(self, line: str) -> None:
        """Print a line to stdout, at once, above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
