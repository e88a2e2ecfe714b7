"""What is saved, where, and what is loaded."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = None
    """Folder that checkpoints are written to."""
    load: str | None = None
    """Folder that the run resumes from; usually the same as --save."""
    save_interval: int | None = None
    """Save every so many iterations."""
    save_at: tuple[int, ...] = ()
    """Save after these iterations, too, and keep those checkpoints for ever."""
    async_save: bool = False
    """Go on training while a checkpoint is written. Costs a copy of this rank's masters and moments in the host's memory."""
    max_save_failures: int = 3
    """So many saves that fail in a row end the run: it would only train what cannot be kept."""
    save_retry_interval: int = 10
    """A save that failed is tried again after so many iterations; one at the end of the run at once."""
    keep_latest_checkpoints: int | None = None
    """Keep only so many of the newest checkpoints; an older one is removed once a newer one was
    read back from the disk. One without an applied step since the one before it does not count. Default:
    keep all."""
    keep_every: int | None = None
    """With --keep-latest-checkpoints, keep those of iterations divisible by this for ever."""
    save_optim: bool = True
    """Save the optimizer's state; without it (--no-save-optim) a resume starts with fresh moments."""
    load_iteration: int | None = None
    """Load this iteration's checkpoint and no other, wherever the pointers point. For one launch: a script that is started again
    with it would go back again; to roll back for good, edit the pointers."""
    load_fallback: bool = True
    """Where the checkpoint that the pointers name is damaged, set it aside and go on from the newest good one before it; with
    --load-iteration, or --no-load-fallback, damage is an error."""
    load_optim: bool = True
    """Load the optimizer's state; without it (--no-load-optim) moments and their step count start afresh."""
    finetune: bool = False
    """Load the weights only: iteration, data position, optimizer and schedules start afresh."""
    require_load: bool = False
    """Refuse to start without a checkpoint."""
    allow_fresh_start: bool = False
    """Start afresh although --load shows traces of a run without a usable pointer."""

    @property
    def resumes_itself(self) -> bool:
        """--load and --save are one folder, however they are spelled."""
        return (
            self.load is not None
            and self.save is not None
            and os.path.realpath(self.load) == os.path.realpath(self.save)
        )
