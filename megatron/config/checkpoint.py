"""What is saved, where, and what is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    save: str | None = None
    """Folder that checkpoints are written to."""
    load: str | None = None
    """Folder that the run resumes from; usually the same as --save."""
    save_interval: int | None = None
    """Save every so many iterations."""
    save_optim: bool = True
    """Save the optimizer's state; without it (--no-save-optim) a resume starts with fresh moments."""
    load_optim: bool = True
    """Load the optimizer's state; without it (--no-load-optim) moments and their step count start afresh."""
    finetune: bool = False
    """Load the weights only: iteration, data position, optimizer and schedules start afresh."""
    require_load: bool = False
    """Refuse to start without a checkpoint."""
    allow_fresh_start: bool = False
    """Start afresh although --load shows traces of a run without a usable pointer."""
