"""Where a run starts: which checkpoint, and what happens to those that are damaged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import (
    LATEST,
    Pointer,
    find_stored_folder,
    has_no_checkpoint_yet,
    list_run_leftovers,
    list_saved_iterations,
    parse_iteration,
    point_to,
    read_pointer,
    remove_interrupted_leftovers,
    set_aside,
)
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.manifest import MANIFEST, manifest_of_text
from megatron.checkpoint.ranks import Ranks
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, DamagedError

_ATTEMPTS = 5
"""At finding a checkpoint that a run which lives there does not remove meanwhile."""


@dataclass(frozen=True)
class StartPoint:
    checkpoint: Checkpoint | None
    """None: afresh."""
    damaged: tuple[tuple[int, str], ...] = ()
    """(iteration, what is wrong) of those that would have come first."""
    notes: tuple[str, ...] = ()

    @property
    def iteration(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.iteration

    def to_json(self) -> dict[str, Any]:
        """For the other ranks."""
        checkpoint = None
        if self.checkpoint is not None:
            found = self.checkpoint
            checkpoint = {
                "folder": str(found.folder),
                "manifest": found.manifest.dump_json(),
                "config_yaml": found.config_yaml,
            }
        return {"checkpoint": checkpoint, "damaged": self.damaged, "notes": self.notes}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "StartPoint":
        """Of what `to_json` made."""
        checkpoint = None
        if found := record["checkpoint"]:
            folder = Path(found["folder"])
            checkpoint = Checkpoint(
                folder, manifest_of_text(found["manifest"], folder), found["config_yaml"]
            )
        damaged = tuple((iteration, what) for iteration, what in record["damaged"])
        return cls(checkpoint, damaged, tuple(record["notes"]))


def find_start(
    config: CheckpointConfig, known_damage: Mapping[int, str] | None = None
) -> StartPoint:
    """The checkpoint that `--load` leads to. Looks at small files and sizes, and changes nothing.

    `known_damage`: iteration -> what was found wrong with its tensors.

    Raises:
        CheckpointError: there should be one, or there are traces of a run and no pointer to say where it stood; or all that could
            be taken are damaged.
    """
    try:
        for _ in range(_ATTEMPTS - 1):
            pointed = _read_pointed(config)
            try:
                start = _find(config, known_damage)
                if not start.damaged or _read_pointed(config) == pointed:
                    return start
            except DamagedError:
                if _read_pointed(config) == pointed:
                    raise
            # A run that lives there has moved on, and removed what was being read.
        return _find(config, known_damage)
    except DamagedError as damage:
        raise CheckpointError(str(damage)) from damage
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints cannot be read: {error}; mend the file system or the permissions"
        ) from error


def _read_pointed(config: CheckpointConfig) -> int | None:
    pointer = None if config.load is None else read_pointer(Path(config.load))
    return None if pointer is None else pointer.iteration


def _find(config: CheckpointConfig, known_damage: Mapping[int, str] | None) -> StartPoint:
    _refuse_to_overwrite(config)
    if config.load is None:
        if config.require_load:
            raise CheckpointError("--require-load needs --load FOLDER")
        return StartPoint(None)
    root = Path(config.load)
    if parse_iteration(root.name) is not None or (root / MANIFEST).is_file():
        raise CheckpointError(
            f"--load {root} is one checkpoint; give its run's folder, and --load-iteration to choose one of it"
        )
    saved = list_saved_iterations(root)
    if config.load_iteration is not None:
        if config.load_iteration not in saved:
            there = ", ".join(f"global_step{i}" for i in saved) or "none"
            raise CheckpointError(
                f"--load-iteration {config.load_iteration}: {root} has no such checkpoint; there are: {there}"
            )
        checkpoint = _open_complete(root, config.load_iteration, known_damage)
        return StartPoint(checkpoint, (), _note_later(saved, config.load_iteration, config))
    pointer = read_pointer(root)
    if pointer is None and len(saved) == 1 and has_no_checkpoint_yet(root):
        pointer = Pointer(
            saved[0], None
        )  # the first one: cut off between its name and the pointers
    if pointer is None:
        _refuse_to_start_over(config, root, saved)
        return StartPoint(None)
    notes = () if pointer.contradiction is None else (f"{root}: {pointer.contradiction}",)
    # Those that loading found damaged may have been set aside since.
    damaged = [
        (iteration, what)
        for iteration, what in (known_damage or {}).items()
        if iteration not in saved
    ]
    lineage = find_lineage_before(root, pointer.iteration)
    before = [
        (a.iteration, a.digest)
        for a in reversed(lineage or ())
        if find_stored_folder(root, a.iteration).is_dir()
    ]
    for iteration, digest in [(pointer.iteration, None), *before]:
        try:
            found = _open_complete(root, iteration, known_damage)
        except DamagedError as damage:
            damaged.append((iteration, str(damage)))
            if config.load_fallback:
                continue
            raise _make_no_start_error(
                damaged, "--no-load-fallback forbids to take an older one"
            ) from damage
        if digest not in (None, found.manifest.digest):
            continue  # of another lineage, under the same number
        return StartPoint(
            found, tuple(damaged), (*notes, *_note_later(saved, pointer.iteration, config))
        )
    others = ", ".join(f"global_step{i}" for i in saved if i not in dict(damaged)) or "none"
    if lineage is None:
        raise _make_no_start_error(
            damaged, f"which older ones the run came through cannot be read; there are: {others}"
        )
    raise _make_no_start_error(
        damaged,
        f"and there is no older one of this lineage that is whole; of others there are: {others}",
    )


def _open_complete(
    root: Path, iteration: int, known_damage: Mapping[int, str] | None
) -> Checkpoint:
    if known_damage and iteration in known_damage:
        raise DamagedError(known_damage[iteration], "")
    checkpoint = open_checkpoint(root, iteration)
    try:
        checkpoint.check_files()
    except DamagedError as damage:
        raise DamagedError(f"{checkpoint.folder} is damaged: {damage}", damage.file) from damage
    return checkpoint


def _make_no_start_error(damaged: list[tuple[int, str]], why: str) -> DamagedError:
    listed = "\n  ".join(what for _, what in damaged)
    return DamagedError(
        f"there is nothing to go on from:\n  {listed}\n{why}; restore it from a copy, or point {LATEST} to another checkpoint",
        "",
    )


def _note_later(saved: list[int], iteration: int, config: CheckpointConfig) -> tuple[str, ...]:
    """Checkpoints of a lineage that this start goes back behind."""
    later = [f"global_step{i}" for i in saved if i > iteration]
    if not later or not config.resumes_itself:
        return ()
    return (
        f"later than global_step{iteration}, where this run starts: {', '.join(later)}; each stays until a save of the same "
        "iteration replaces it",
    )


def _refuse_to_start_over(config: CheckpointConfig, root: Path, saved: list[int]) -> None:
    if config.require_load or config.finetune:
        flag = "--require-load" if config.require_load else "--finetune"
        raise CheckpointError(f"{flag}: {root / LATEST} is not there, so there is nothing to load")
    found = list_run_leftovers(root)
    if found and not config.allow_fresh_start and not (has_no_checkpoint_yet(root) and not saved):
        point = (
            f"write global_step{saved[-1]} into {root / LATEST} to go on from there, or "
            if saved
            else ""
        )
        raise CheckpointError(
            f"{root} holds traces of a run ({', '.join(found[:8])}{', ...' if len(found) > 8 else ''}) but no pointer "
            f"{LATEST}; {point}give --allow-fresh-start to begin at iteration 0"
        )


def _refuse_to_overwrite(config: CheckpointConfig) -> None:
    """A run that would begin anew in a folder where another one has checkpoints has probably lost its `--load`."""
    if (
        config.save is None
        or config.allow_fresh_start
        or (config.resumes_itself and not config.finetune)
    ):
        return
    saved = list_saved_iterations(Path(config.save))
    if saved:
        leave_out = ", without --finetune," if config.finetune else ""
        why = (
            "--finetune would begin at iteration 0 over it"
            if config.resumes_itself
            else "--load does not lead there"
        )
        raise CheckpointError(
            f"--save {config.save} holds a run (its last checkpoint is global_step{saved[-1]}) and {why}; "
            f"give --load {config.save}{leave_out} to go on with it, another --save, or --allow-fresh-start to begin over it"
        )


def agree_on_start(
    config: CheckpointConfig,
    ranks: Ranks,
    known_damage: Mapping[int, str],
    *,
    holds_lease: bool,
    say: Callable[[str], None],
) -> StartPoint:
    """As `find_start`, decided by rank 0 for all ranks. `holds_lease`: this run holds the lease of --load, so it clears up what an
    earlier one left there, and sets damaged checkpoints aside.

    Raises:
        CheckpointError: on every rank, as `find_start`; or a rank does not see what rank 0 sees.
    """

    def find() -> tuple[StartPoint, str | None, Exception | None]:
        if ranks.rank != 0:
            return StartPoint(None), None, None
        try:
            root = Path(str(config.load))
            for trouble in remove_interrupted_leftovers(root) if holds_lease else ():
                say(f"warning: {trouble}")
            start = find_start(config, known_damage)
            _report(start, config, holds_lease=holds_lease, say=say)
        except CheckpointError as error:
            return StartPoint(None), str(error), error
        except OSError as error:
            return StartPoint(None), f"{config.load} cannot be read or written: {error}", error
        return start, None, None

    start, problem, cause = ranks.work(find, "looking for the checkpoint to start from", say)
    record, problem = ranks.gather([start.to_json(), problem])[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    return StartPoint.from_json(record)


def _report(
    start: StartPoint, config: CheckpointConfig, *, holds_lease: bool, say: Callable[[str], None]
) -> None:
    for note in start.notes:
        say(f"warning: {note}")
    still_there = [
        (i, what)
        for i, what in start.damaged
        if find_stored_folder(Path(str(config.load)), i).is_dir()
    ]
    for iteration, what in still_there:
        say(f"warning: {what}")
        if holds_lease and start.iteration is not None:
            root = Path(str(config.load))
            point_to(root, start.iteration)  # first: no pointer may name what is renamed
            say(f"warning: set aside as {set_aside(root, iteration).name}")
    if still_there:
        say(
            f"warning: going on from global_step{start.iteration}, the newest good checkpoint before it"
        )


def agree_on_damage(checkpoint: Checkpoint, mine: DamagedError | None, ranks: Ranks) -> str | None:
    """After all ranks have loaded: what is wrong with the checkpoint, as rank 0 sees it, too; None: nothing.

    Raises:
        CheckpointError: on every rank; some rank read something else than rank 0 does, so it is not the checkpoint that is broken.
    """
    mine_as_json = None if mine is None else [ranks.rank, str(mine), mine.file]
    found = [damage for damage in ranks.gather(mine_as_json) if damage is not None]
    if not found:
        return None
    rank, what, file = found[0]

    def judge() -> tuple[str | None, str | None, Exception | None]:
        """Return what is damaged, what else is wrong, and the error behind that."""
        if ranks.rank != 0:
            return None, None, None
        if rank == 0:
            return f"{checkpoint.folder} is damaged: {what}", None, None
        try:
            checkpoint.verify(file)
        except DamagedError as damage:
            return f"{checkpoint.folder} is damaged: {damage}", None, None
        except (CheckpointError, OSError) as error:
            problem = f"{checkpoint.folder / file} cannot be read: {error}"
            return None, problem, error
        problem = (
            f"rank {rank} reads of {checkpoint.folder}: {what}; but rank 0 finds {file} whole: is the folder the same on all "
            "hosts, and that host's memory and network sound?"
        )
        return None, problem, None

    damaged, problem, cause = ranks.work(judge, f"reading {file} of {checkpoint.folder} again")
    damaged, problem = ranks.gather([damaged, problem])[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    return str(damaged)
