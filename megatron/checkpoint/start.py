"""Where a run starts: which checkpoint, and what happens to those that are damaged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.course import ancestors
from megatron.checkpoint.folder import (
    LATEST,
    Pointer,
    begun_without_checkpoint,
    iteration_of,
    point_to,
    read_pointer,
    saved_iterations,
    set_aside,
    stored_folder,
    tidy,
    traces,
)
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.ranks import Ranks
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, DamagedError

_ATTEMPTS = 5
"""At finding a checkpoint that a run which lives there does not remove meanwhile."""


@dataclass(frozen=True)
class Start:
    checkpoint: Checkpoint | None
    """None: afresh."""
    damaged: tuple[tuple[int, str], ...] = ()
    """(iteration, what is wrong) of those that would have come first."""
    notes: tuple[str, ...] = ()

    @property
    def iteration(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.iteration


def find_start(config: CheckpointConfig, known_damage: Mapping[int, str] | None = None) -> Start:
    """The checkpoint that `--load` leads to. Looks at small files and sizes, and changes nothing.

    `known_damage`: iteration -> what was found wrong with its tensors.

    Raises:
        CheckpointError: there should be one, or there are traces of a run and no pointer to say where it stood; or all that could
            be taken are damaged.
    """
    try:
        for _ in range(_ATTEMPTS - 1):
            pointed = _pointed(config)
            try:
                start = _find(config, known_damage)
                if not start.damaged or _pointed(config) == pointed:
                    return start
            except DamagedError:
                if _pointed(config) == pointed:
                    raise
            # A run that lives there has moved on, and removed what was being read.
        return _find(config, known_damage)
    except DamagedError as damage:
        raise CheckpointError(str(damage)) from damage
    except OSError as error:
        raise CheckpointError(f"the checkpoints cannot be read: {error}; mend the file system or the permissions") from error


def _pointed(config: CheckpointConfig) -> int | None:
    pointer = None if config.load is None else read_pointer(Path(config.load))
    return None if pointer is None else pointer.iteration


def _find(config: CheckpointConfig, known_damage: Mapping[int, str] | None) -> Start:
    _refuse_to_overwrite(config)
    if config.load is None:
        if config.require_load:
            raise CheckpointError("--require-load needs --load FOLDER")
        return Start(None)
    root = Path(config.load)
    if iteration_of(root.name) is not None or (root / MANIFEST).is_file():
        raise CheckpointError(f"--load {root} is one checkpoint; give its run's folder, and --load-iteration to choose one of it")
    saved = saved_iterations(root)
    if config.load_iteration is not None:
        if config.load_iteration not in saved:
            there = ", ".join(f"global_step{i}" for i in saved) or "none"
            raise CheckpointError(f"--load-iteration {config.load_iteration}: {root} has no such checkpoint; there are: {there}")
        checkpoint = _opened(root, config.load_iteration, known_damage)
        return Start(checkpoint, (), _later(saved, config.load_iteration, config))
    pointer = read_pointer(root)
    if pointer is None and len(saved) == 1 and begun_without_checkpoint(root):
        pointer = Pointer(saved[0], None)  # the first one: cut off between its name and the pointers
    if pointer is None:
        _refuse_to_begin_anew(config, root, saved)
        return Start(None)
    notes = () if pointer.contradiction is None else (f"{root}: {pointer.contradiction}",)
    # Those that loading found damaged may have been set aside since.
    damaged = [(iteration, what) for iteration, what in (known_damage or {}).items() if iteration not in saved]
    course = ancestors(root, pointer.iteration)
    before = [(a.iteration, a.digest) for a in reversed(course or ()) if stored_folder(root, a.iteration).is_dir()]
    for iteration, digest in [(pointer.iteration, None), *before]:
        try:
            found = _opened(root, iteration, known_damage)
        except DamagedError as damage:
            damaged.append((iteration, str(damage)))
            if config.load_fallback:
                continue
            raise _no_way_on(damaged, "--no-load-fallback forbids to take an older one") from damage
        if digest not in (None, found.manifest.digest):
            continue  # of another course, under the same number
        return Start(found, tuple(damaged), (*notes, *_later(saved, pointer.iteration, config)))
    others = ", ".join(f"global_step{i}" for i in saved if i not in dict(damaged)) or "none"
    if course is None:
        raise _no_way_on(damaged, f"which older ones the run came through cannot be read; there are: {others}")
    raise _no_way_on(damaged, f"and there is no older one of this course that is whole; of others there are: {others}")


def _opened(root: Path, iteration: int, known_damage: Mapping[int, str] | None) -> Checkpoint:
    if known_damage and iteration in known_damage:
        raise DamagedError(known_damage[iteration], "")
    checkpoint = open_checkpoint(root, iteration)
    try:
        checkpoint.check_files()
    except DamagedError as damage:
        raise DamagedError(f"{checkpoint.folder} is damaged: {damage}", damage.file) from damage
    return checkpoint


def _no_way_on(damaged: list[tuple[int, str]], why: str) -> DamagedError:
    listed = "\n  ".join(what for _, what in damaged)
    return DamagedError(
        f"there is nothing to go on from:\n  {listed}\n{why}; restore it from a copy, or point {LATEST} to another checkpoint", ""
    )


def _later(saved: list[int], iteration: int, config: CheckpointConfig) -> tuple[str, ...]:
    """Checkpoints of a course that this start goes back behind."""
    later = [f"global_step{i}" for i in saved if i > iteration]
    if not later or not config.resumes_itself:
        return ()
    return (
        f"later than global_step{iteration}, where this run starts: {', '.join(later)}; each stays until a save of the same "
        "iteration replaces it",
    )


def _refuse_to_begin_anew(config: CheckpointConfig, root: Path, saved: list[int]) -> None:
    if config.require_load or config.finetune:
        flag = "--require-load" if config.require_load else "--finetune"
        raise CheckpointError(f"{flag}: {root / LATEST} is not there, so there is nothing to load")
    found = traces(root)
    if found and not config.allow_fresh_start and not (begun_without_checkpoint(root) and not saved):
        point = f"write global_step{saved[-1]} into {root / LATEST} to go on from there, or " if saved else ""
        raise CheckpointError(
            f"{root} holds traces of a run ({', '.join(found[:8])}{', ...' if len(found) > 8 else ''}) but no pointer "
            f"{LATEST}; {point}give --allow-fresh-start to begin at iteration 0"
        )


def _refuse_to_overwrite(config: CheckpointConfig) -> None:
    """A run that would begin anew in a folder where another one has checkpoints has probably lost its `--load`."""
    if config.save is None or config.allow_fresh_start or (config.resumes_itself and not config.finetune):
        return
    saved = saved_iterations(Path(config.save))
    if saved:
        leave_out = ", without --finetune," if config.finetune else ""
        why = "--finetune would begin at iteration 0 over it" if config.resumes_itself else "--load does not lead there"
        raise CheckpointError(
            f"--save {config.save} holds a run (its last checkpoint is global_step{saved[-1]}) and {why}; "
            f"give --load {config.save}{leave_out} to go on with it, another --save, or --allow-fresh-start to begin over it"
        )


def agree_on_start(
    config: CheckpointConfig, ranks: Ranks, known_damage: Mapping[int, str], *, own_folder: bool, say: Callable[[str], None]
) -> Start:
    """As `find_start`, decided by rank 0 for all ranks. `own_folder`: this run holds the lease of --load, so it clears up what an
    earlier one left there, and sets damaged checkpoints aside.

    Raises:
        CheckpointError: on every rank, as `find_start`; or a rank does not see what rank 0 sees.
    """
    start, problem = Start(None), None
    cause: Exception | None = None
    if ranks.rank == 0:
        try:
            root = Path(str(config.load))
            for trouble in tidy(root) if own_folder else ():
                say(f"warning: {trouble}")
            start = find_start(config, known_damage)
            _report(start, config, own_folder=own_folder, say=say)
        except CheckpointError as error:
            problem, cause = str(error), error
        except OSError as error:
            problem, cause = f"{config.load} cannot be read or written: {error}", error
    start, problem = ranks.gather((start, problem))[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    return start


def _report(start: Start, config: CheckpointConfig, *, own_folder: bool, say: Callable[[str], None]) -> None:
    for note in start.notes:
        say(f"warning: {note}")
    still_there = [(i, what) for i, what in start.damaged if stored_folder(Path(str(config.load)), i).is_dir()]
    for iteration, what in still_there:
        say(f"warning: {what}")
        if own_folder and start.iteration is not None:
            root = Path(str(config.load))
            point_to(root, start.iteration)  # first: no pointer may name what is renamed
            say(f"warning: set aside as {set_aside(root, iteration).name}")
    if still_there:
        say(f"warning: going on from global_step{start.iteration}, the newest good checkpoint before it")


def agree_on_damage(checkpoint: Checkpoint, mine: DamagedError | None, ranks: Ranks) -> str | None:
    """After all ranks have loaded: what is wrong with the checkpoint, as rank 0 sees it, too; None: nothing.

    Raises:
        CheckpointError: on every rank; some rank read something else than rank 0 does, so it is not the checkpoint that is broken.
    """
    found = [damage for damage in ranks.gather(None if mine is None else (ranks.rank, str(mine), mine.file)) if damage is not None]
    if not found:
        return None
    rank, what, file = found[0]
    verdict: tuple[str | None, str | None] = (None, None)
    cause: Exception | None = None
    if ranks.rank == 0:
        try:
            if rank != 0:
                checkpoint.verify(file)
                verdict = (
                    None,
                    (
                        f"rank {rank} reads of {checkpoint.folder}: {what}; but rank 0 finds {file} whole: is the folder the "
                        "same on all hosts, and that host's memory and network sound?"
                    ),
                )
            else:
                verdict = f"{checkpoint.folder} is damaged: {what}", None
        except DamagedError as damage:
            verdict = f"{checkpoint.folder} is damaged: {damage}", None
        except (CheckpointError, OSError) as error:
            verdict = None, f"{checkpoint.folder / file} cannot be read: {error}"
            cause = error
    damaged, problem = ranks.gather(verdict)[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    return damaged
