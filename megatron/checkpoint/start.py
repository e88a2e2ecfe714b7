"""Decide from which checkpoint a run starts, and rename damaged ones.

Invariants: rank 0 decides for all ranks. A run falls back only to checkpoints of its own lineage,
which are those that it came through (see `lineage.py`). Nothing on the disk changes unless this run
holds the lease of the folder.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, DamagedError
from megatron.checkpoint.folder import (
    LATEST,
    Pointer,
    find_foreign_maker,
    find_stored_folder,
    has_no_checkpoint_yet,
    list_run_leftovers,
    list_saved_iterations,
    parse_iteration,
    point_to,
    read_pointed_iteration,
    read_pointer,
    remove_interrupted_leftovers,
    set_aside,
)
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.manifest import MANIFEST, manifest_of_text
from megatron.checkpoint.store import Store
from megatron.config.checkpoint import CheckpointConfig, resolve_place
from megatron.parallel.ranks import Ranks

_ATTEMPTS = 5
"""Attempts to find a checkpoint while another run may be removing old ones in the same folder."""


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint that a run starts from, and what was found on the way to it."""

    checkpoint: Checkpoint | None
    """None if the run starts from scratch."""
    damaged: tuple[tuple[int, str], ...] = ()
    """(iteration, what is wrong) of each damaged checkpoint that would have been chosen instead."""
    notes: tuple[str, ...] = ()
    """Warnings to log."""

    @property
    def iteration(self) -> int | None:
        """Iteration of the checkpoint. None if the run starts from scratch."""
        if self.checkpoint is None:
            return None
        return self.checkpoint.iteration


def describe_checkpoint(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return an open checkpoint as JSON for the other ranks."""
    if checkpoint is None:
        return None
    # The text of the small files is included, so that the other ranks need not read them.
    return {
        "folder": str(checkpoint.folder),
        "manifest": checkpoint.manifest.dump_json(),
        "config_yaml": checkpoint.config_yaml,
    }


def restore_checkpoint(record: dict[str, Any] | None) -> Checkpoint | None:
    """Return the checkpoint that `describe_checkpoint` described, without reading its folder."""
    if record is None:
        return None
    folder = Path(record["folder"])
    return Checkpoint(folder, manifest_of_text(record["manifest"], folder), record["config_yaml"])


def choose_own_run(config: CheckpointConfig) -> CheckpointConfig:
    """Return the flags that resume the run in --save, if it was started from --load.

    The same command line then starts and resumes a run. If --save has no checkpoint yet, or one of
    a run with another beginning, --load remains the folder to start from.

    Raises:
        CheckpointError: See `find_start`.
    """
    if config.pretrained_checkpoint is not None:
        base = config.pretrained_checkpoint
        config = replace(config, load=base, finetune=True, pretrained_checkpoint=None)
    is_own = config.load is None or config.save is None or config.resumes_itself
    if (
        is_own
        or config.allow_fresh_start
        or not list_saved_iterations(Path(str(config.save_folder)))
    ):
        return config
    own = replace(
        config,
        load=config.save,
        # These flags are about the checkpoint that the run began from.
        load_iteration=None,
        load_optim=config.load_optim or config.save_optim,
        finetune=False,
    )
    found = find_start(own).checkpoint
    if found is None:
        return config
    root, name = os.path.split(found.state.get("base", ""))
    same_iteration = config.load_iteration in (None, parse_iteration(name))
    if root == resolve_place(str(config.load)) and same_iteration:
        return own
    return config


def find_start(
    config: CheckpointConfig, known_damage: Mapping[int, str] | None = None
) -> StartPoint:
    """Find the checkpoint that `--load` leads to.

    It reads small files and the sizes of large ones, and changes nothing.

    Args:
        config: The flags `--load`, `--save` and those that change their meaning.
        known_damage: Iteration -> what an earlier attempt to load found wrong with its tensors.

    Raises:
        CheckpointError: If a required checkpoint does not exist, or every checkpoint that could be
            taken is damaged. Also if the folder has traces of a run but no pointer.
    """
    try:
        # Before the pointers are read, because Megatron-LM's have the same names.
        _refuse_foreign_checkpoint(config)
        # Another run may be alive in the folder. It may remove a checkpoint while we read it, which
        # looks like damage. If the pointers have moved since, we look again. The last attempt,
        # after the loop, is taken as it is.
        for _ in range(_ATTEMPTS - 1):
            pointed = _read_pointed(config)
            try:
                start = _find_once(config, known_damage)
                if not start.damaged or _read_pointed(config) == pointed:
                    return start
            except DamagedError:
                if _read_pointed(config) == pointed:
                    raise
        return _find_once(config, known_damage)
    except DamagedError as damage:
        raise CheckpointError(str(damage)) from damage
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints cannot be read: {error}; fix the file system or the permissions"
        ) from error


def _read_pointed(config: CheckpointConfig) -> int | None:
    """Return the iteration that the pointers of `--load` name. None if there is no pointer."""
    if config.load is None:
        return None
    return read_pointed_iteration(Path(str(config.load_folder)))


def _find_once(config: CheckpointConfig, known_damage: Mapping[int, str] | None) -> StartPoint:
    """Find the start point in one attempt. See `find_start`.

    Raises:
        DamagedError: If every checkpoint that could be taken is damaged.
        CheckpointError: As `find_start`.
    """
    _refuse_to_overwrite(config)
    if config.load is None:
        if config.require_load:
            raise CheckpointError("--require-load needs --load FOLDER")
        return StartPoint(None)
    root = Path(str(config.load_folder))
    _refuse_single_checkpoint(root)
    saved = list_saved_iterations(root)
    if (iteration := config.load_iteration) is not None:
        # There is no fallback. An operator who names an iteration wants that one or an error.
        if iteration not in saved:
            existing = ", ".join(f"global_step{i}" for i in saved) or "none"
            raise CheckpointError(
                f"--load-iteration {iteration}: {root} has no such checkpoint; there are: "
                f"{existing}"
            )
        checkpoint = _open_complete(root, iteration, known_damage)
        return StartPoint(checkpoint, (), _note_later(saved, iteration, config))
    pointer = read_pointer(root)
    if pointer is None and len(saved) == 1 and has_no_checkpoint_yet(root):
        # The very first save was killed between the rename of its folder and the pointers. The
        # marker proves that no older checkpoint existed, so this one must be it.
        pointer = Pointer(saved[0], None)
    if pointer is None:
        _refuse_to_start_over(config, root, saved)
        return StartPoint(None)
    return _take_newest_intact(root, pointer, saved, config, known_damage)


def _refuse_single_checkpoint(root: Path) -> None:
    """Raise if `--load` is the folder of a checkpoint, and not that of a run.

    Raises:
        CheckpointError: If it is.
    """
    if parse_iteration(root.name) is not None or (root / MANIFEST).is_file():
        raise CheckpointError(
            f"--load {root} is a single checkpoint; give the folder of its run, and "
            "--load-iteration to choose a checkpoint"
        )


def _refuse_foreign_checkpoint(config: CheckpointConfig) -> None:
    """Raise if `--load` has a checkpoint of another program. Training would start from scratch.

    Raises:
        CheckpointError: If it has.
    """
    if config.load is None or list_saved_iterations(Path(str(config.load_folder))):
        return
    maker = find_foreign_maker(Path(str(config.load_folder)))
    if maker is not None:
        raise CheckpointError(
            f"--load {config.load} holds a checkpoint of {maker}, which cannot be read here; "
            "convert it with tools/convert_checkpoint.py (docs/huggingface.md, docs/migrating.md), "
            "give the --save folder of a run of this program, or leave out --load to start from "
            "scratch"
        )


def _take_newest_intact(
    root: Path,
    pointer: Pointer,
    saved: list[int],
    config: CheckpointConfig,
    known_damage: Mapping[int, str] | None,
) -> StartPoint:
    """Return the start from the pointed checkpoint, or the newest intact one of its lineage.

    Args:
        root: Folder of the checkpoints.
        pointer: The checkpoint that is tried first.
        saved: Iterations of all checkpoints in `root`.
        config: See `find_start`.
        known_damage: See `find_start`.

    Raises:
        DamagedError: If every checkpoint that could be taken is damaged.
        CheckpointError: If a checkpoint cannot be read.
    """
    # Damaged checkpoints of an earlier attempt were renamed meanwhile, so the loop below does not
    # meet them. They are still part of the report.
    damaged = [
        (iteration, what)
        for iteration, what in (known_damage or {}).items()
        if iteration not in saved
    ]
    lineage = find_lineage_before(root, pointer.iteration)
    # The pointed checkpoint is taken whatever its digest, because the operator may have edited the
    # pointers. An older one must have the digest that the lineage gives.
    candidates: list[tuple[int, str | None]] = [(pointer.iteration, None)]
    candidates += [
        (entry.iteration, entry.digest)
        for entry in reversed(lineage or ())
        if find_stored_folder(root, entry.iteration).is_dir()
    ]
    for iteration, digest in candidates:
        try:
            found = _open_complete(root, iteration, known_damage)
        except DamagedError as damage:
            damaged.append((iteration, str(damage)))
            if config.load_fallback:
                continue
            raise _make_no_start_error(
                damaged, "--no-load-fallback forbids an older one"
            ) from damage
        if digest not in (None, found.manifest.digest):
            # This folder has the same iteration, but its checkpoint belongs to another lineage.
            continue
        notes = _note_later(saved, pointer.iteration, config)
        if pointer.contradiction is not None:
            notes = (f"{root}: {pointer.contradiction}", *notes)
        return StartPoint(found, tuple(damaged), notes)
    others = ", ".join(f"global_step{i}" for i in saved if i not in dict(damaged)) or "none"
    if lineage is None:
        # Without a lineage, nothing is guessed. A checkpoint of a lineage that was rolled back
        # would bring back the data or the loss spike that the operator wanted to avoid.
        why = f"the lineage of this run cannot be read; there are: {others}"
    else:
        why = f"this lineage has no older intact one; checkpoints of other lineages: {others}"
    raise _make_no_start_error(damaged, why)


def _open_complete(
    root: Path, iteration: int, known_damage: Mapping[int, str] | None
) -> Checkpoint:
    """Open a checkpoint whose small files are intact and whose other files have their sizes.

    Raises:
        DamagedError: If a file is missing, cut off or altered, or `known_damage` has the iteration.
    """
    # An earlier attempt has found damage inside a tensor file. Its size is right, so `check_files`
    # would not find the damage, and the checkpoint would be chosen again and again.
    if known_damage and iteration in known_damage:
        raise DamagedError(known_damage[iteration], "")
    checkpoint = open_checkpoint(root, iteration)
    try:
        checkpoint.check_files()
    except DamagedError as damage:
        raise DamagedError(f"{checkpoint.folder} is damaged: {damage}", damage.file) from damage
    return checkpoint


def _make_no_start_error(damaged: list[tuple[int, str]], why: str) -> DamagedError:
    """Return the error that lists all damaged checkpoints."""
    listed = "\n  ".join(what for _, what in damaged)
    return DamagedError(
        f"there is no checkpoint to resume from:\n  {listed}\n{why}; restore one from a copy, or "
        f"write the name of another checkpoint into {LATEST}",
        "",
    )


def _note_later(saved: list[int], iteration: int, config: CheckpointConfig) -> tuple[str, ...]:
    """Return a note that lists the later checkpoints, if this run saves into the same folder."""
    later = [f"global_step{i}" for i in saved if i > iteration]
    if not later or not config.resumes_itself:
        return ()
    return (
        f"checkpoints later than global_step{iteration}, from which this run starts: "
        f"{', '.join(later)}; each stays until a save of the same iteration replaces it",
    )


def _refuse_to_start_over(config: CheckpointConfig, root: Path, saved: list[int]) -> None:
    """Raise if a run without a pointer must not start from scratch.

    A lost pointer file must not let a run of weeks begin at iteration 0 over its own checkpoints.

    Raises:
        CheckpointError: If a checkpoint is required, or the folder has traces of a run.
    """
    if config.require_load or config.finetune:
        flag = "--finetune"
        if config.require_load:
            flag = "--require-load"
        raise CheckpointError(
            f"{flag}: {root / LATEST} does not exist, so there is nothing to load"
        )
    found = list_run_leftovers(root)
    # A run that ended before its first checkpoint left traces, too. The marker shows that nothing
    # is lost, so the same command starts again without a flag.
    if found and not config.allow_fresh_start and not (has_no_checkpoint_yet(root) and not saved):
        advice = ""
        if saved:
            advice = f"write global_step{saved[-1]} into {root / LATEST} to resume from it, or "
        more = ""
        if len(found) > 8:
            more = ", ..."
        raise CheckpointError(
            f"{root} holds traces of a run ({', '.join(found[:8])}{more}) but no pointer "
            f"{LATEST}; {advice}give --allow-fresh-start to start at iteration 0"
        )


def _refuse_to_overwrite(config: CheckpointConfig) -> None:
    """Raise if the run would start from scratch in a folder that holds another run's checkpoints.

    The command has probably lost its `--load`.

    Raises:
        CheckpointError: If `--save` holds checkpoints that `--load` does not lead to.
    """
    if (
        config.save is None
        or config.allow_fresh_start
        or (config.resumes_itself and not config.finetune)
    ):
        return
    saved = list_saved_iterations(Path(str(config.save_folder)))
    if saved:
        leave_out = ", without --finetune," * config.finetune
        if config.resumes_itself:
            why = "--finetune would start at iteration 0 and overwrite its checkpoints"
        elif config.load is not None:
            why = f"it did not begin from that checkpoint of --load {config.load}"
        else:
            why = "--load does not lead there"
        raise CheckpointError(
            f"--save {config.save} holds a run (its last checkpoint is global_step{saved[-1]}) "
            f"and {why}; "
            f"give --load {config.save}{leave_out} to continue it, another --save, or "
            "--allow-fresh-start to overwrite it"
        )


def take_start(
    config: CheckpointConfig,
    known_damage: Mapping[int, str],
    *,
    holds_lease: bool,
    log: Callable[[str], None],
) -> StartPoint:
    """Return the start point, and report what was found on the way to it. Rank 0 calls it.

    Args:
        config: See `find_start`.
        known_damage: See `find_start`.
        holds_lease: This run holds the lease of `--load`. It then removes what an interrupted run
            left there, and renames damaged checkpoints.
        log: Called with warnings.

    Raises:
        CheckpointError: As `find_start`, or if the disk cannot be read or written.
    """
    try:
        if holds_lease:
            for trouble in remove_interrupted_leftovers(Path(str(config.load_folder))):
                log(f"warning: {trouble}")
        start = find_start(config, known_damage)
        if start.notes or start.damaged:
            _report(start, config, holds_lease=holds_lease, log=log)
    except OSError as error:
        raise CheckpointError(f"{config.load} cannot be read or written: {error}") from error
    return start


def _report(
    start: StartPoint, config: CheckpointConfig, *, holds_lease: bool, log: Callable[[str], None]
) -> None:
    """Log the warnings of a start point, and rename damaged checkpoints if the lease is held.

    Raises:
        OSError: If a pointer cannot be moved or a folder cannot be renamed.
    """
    for note in start.notes:
        log(f"warning: {note}")
    # Those that were renamed in an earlier attempt were reported at that time.
    remaining = [
        (i, what)
        for i, what in start.damaged
        if find_stored_folder(Path(str(config.load_folder)), i).is_dir()
    ]
    for iteration, what in remaining:
        log(f"warning: {what}")
        if holds_lease and start.iteration is not None:
            root = Path(str(config.load_folder))
            # Before the rename. After a kill between the two, the pointers would name a folder that
            # does not exist.
            point_to(root, start.iteration)
            aside = set_aside(root, iteration)
            log(f"warning: global_step{iteration} is renamed to {aside.name}")
    if remaining:
        log(
            f"warning: resuming from global_step{start.iteration}, "
            "the newest intact checkpoint of this lineage"
        )


def agree_on_damage(
    checkpoint: Checkpoint, own_damage: DamagedError | None, ranks: Ranks, store: Store
) -> str | None:
    """Return the damage that a rank found while loading and that rank 0 confirms.

    All ranks call it after all of them have loaded.

    Args:
        checkpoint: The checkpoint that was loaded.
        own_damage: The damage that this rank found, or None.
        ranks: The ranks that load together.
        store: Where the checkpoint is kept.

    Returns:
        What is damaged, or None if no rank found damage.

    Raises:
        CheckpointError: On every rank, if rank 0 finds the file intact or cannot read it. The fault
            is then in one host and not in the checkpoint, so no checkpoint may be given up for it.
    """
    own_damage_as_json: list[Any] | None = None
    if own_damage is not None:
        own_damage_as_json = [ranks.rank, str(own_damage), own_damage.file]
    found = [damage for damage in ranks.gather(own_damage_as_json) if damage is not None]
    if not found:
        return None
    # One damaged file is enough to give the checkpoint up. The others need not be confirmed.
    rank, what, file = found[0]

    def judge() -> str:
        """Return what is damaged."""
        if rank == 0:
            return f"{checkpoint.folder} is damaged: {what}"
        try:
            checkpoint.verify(file, store.verify)
        except DamagedError as damage:
            return f"{checkpoint.folder} is damaged: {damage}"
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{checkpoint.folder / file} cannot be read: {error}") from error
        raise CheckpointError(
            f"rank {rank} found in {checkpoint.folder}: {what}; but rank 0 finds {file} intact. "
            "Check that the folder is the same on all hosts, and check the memory and network of "
            f"the host of rank {rank}"
        )

    return str(ranks.call_on_rank_0(judge, f"reading {file} of {checkpoint.folder} again"))
