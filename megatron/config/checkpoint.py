"""What is saved, where it is saved, and what is loaded."""

import hashlib
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.base.plain_text import is_url
from megatron.config.interval import Range


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of saving and loading checkpoints."""

    save: str | None = None
    """Folder that checkpoints are written to, or an address such as s3://bucket/run. An address
    needs --local-dir."""
    load: str | None = None
    """Folder that the run resumes from. It is usually the same as --save. If it is another one, the
    same command line also resumes the run: it goes on in --save if that began from this folder."""
    pretrained_checkpoint: str | None = None
    """Folder of another run whose weights the run in --save begins with. It is another spelling of
    --load with --finetune, for Megatron-LM's command lines, where --load is the same as --save."""
    local_dir: str | None = None
    """Folder of this host, for a run whose --save or --load is an address. Metrics, chronicle and
    events are written there and uploaded at each save. The folder need not survive the job, and
    hosts need not share it."""
    save_staging: str | None = None
    """Folder of this host where the files of a checkpoint wait for their upload, and where loaded
    ranges are put. A folder in memory, as /dev/shm/run, is possible. Default: the folder staging
    in --local-dir."""
    save_interval: int | None = None
    """Iterations between saves."""
    save_interval_time: str | None = None
    """Time of training between saves, as 30m, besides those of --save-interval."""
    save_at: Annotated[tuple[int, ...], Range("[1, inf)")] = ()
    """Save after these iterations as well, and keep those checkpoints permanently."""
    async_save: bool = False
    """Continue training while a checkpoint is written. This needs host memory for a copy of this
    rank's master weights and moments."""
    max_save_failures: int = 3
    """End the run after this many failed saves in a row, because further training could not be
    saved."""
    save_retry_interval: int = 10
    """Iterations after which a failed save is tried again. At the end of the run it is tried again
    immediately."""
    keep_latest_checkpoints: int | None = None
    """Keep only this many of the newest checkpoints. An older one is removed once a newer one was
    read back from the disk. A checkpoint without an applied step since the previous one does not
    count. Default: keep all."""
    keep_every: int | None = None
    """With --keep-latest-checkpoints, keep the checkpoints of iterations divisible by this
    permanently."""
    keep_for_handover: int | None = None
    """With --keep-latest-checkpoints, also keep the newest checkpoint that is at least this many
    iterations old, so that tools/handover.py can train these iterations again. Default: off."""
    hf_export_interval: int | None = None
    """Iterations between exports to the format of Hugging Face, into the folder hf in --save. The
    first checkpoint of each interval is exported, by a process of its own while training continues.
    If --keep-latest-checkpoints removes it first, it is not exported. Default: off."""
    save_optim: bool = True
    """Save the optimizer's state. Without it (--no-save-optim) a resumed run starts with new
    moments."""
    load_iteration: Annotated[int | None, Range("[1, inf)")] = None
    """Load this iteration's checkpoint and no other, whatever the pointers name. Use it for one
    launch only, because a script that is started again with it would go back again. To roll back
    permanently, edit the pointers."""
    load_fallback: bool = True
    """If the checkpoint that the pointers name is damaged, rename it and resume from the newest
    valid one before it. With --load-iteration or --no-load-fallback, damage is an error."""
    load_optim: bool = True
    """Load the optimizer's state. Without it (--no-load-optim) the moments and their step count
    start from scratch."""
    finetune: bool = False
    """Load the weights only. Iteration, data position, optimizer and schedules start from
    scratch."""
    require_load: bool = False
    """Refuse to start without a checkpoint."""
    allow_fresh_start: bool = False
    """Start from scratch in three cases that are otherwise refused: --load has traces of a run but
    no usable pointer, or --load has no checkpoint and is not the folder of --save, or the object
    latest.json of an address is lost."""

    rehearsal: Literal["exact", "perturbed"] | None = None
    """Save no checkpoint. Only metrics and the chronicle are written to --save. tools/handover.py
    gives this flag. perturbed: the last bit of one weight of each matrix is changed after the load,
    which shows how the run amplifies rounding errors. Default: off."""

    @property
    def resumes_itself(self) -> bool:
        """Whether --load and --save are one folder, in whatever way they are spelled."""
        return (
            self.load is not None
            and self.save is not None
            and resolve_place(self.load) == resolve_place(self.save)
        )

    @property
    def save_folder(self) -> str | None:
        """Folder of the run on this host: --save, or --local-dir if --save is an address."""
        if self.save is None or not is_url(self.save):
            return self.save
        return self.local_dir

    @property
    def load_folder(self) -> str | None:
        """Folder of --load on this host. For an address, it is a folder in --local-dir."""
        if self.load is None or not is_url(self.load):
            return self.load
        if self.resumes_itself:
            return self.save_folder
        name = hashlib.sha256(resolve_place(self.load).encode()).hexdigest()[:12]
        return os.path.join(self.local_dir or "", f"loaded-{name}")


def resolve_place(path: str) -> str:
    """Return one spelling for all paths of a folder, or for all spellings of an address."""
    if is_url(path):
        return path.rstrip("/")
    # A symbolic link, or a relative path, names the same folder.
    return os.path.realpath(path)
