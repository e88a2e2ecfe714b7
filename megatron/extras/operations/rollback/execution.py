"""Take a run back to one of its checkpoints.

Pointers, later checkpoints, charts, metrics and log are taken back together.

Invariant: `latest` names a checkpoint that is right for everything else in the folder, or it names
an unfinished rollback, from which no run starts. After an interruption the same command continues
to the same end. Nothing is deleted. What belongs to later iterations is kept under
rolled-back/<time>/, next to plan.json, which records what was to be done.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from megatron.base.durable import replace_file, sync_folder, write_file
from megatron.base.errors import CheckpointError, OperationsError
from megatron.base.outside_file import load_bytes, load_text
from megatron.checkpoint.folder import (
    LATEST,
    LATEST_ITERATION,
    find_stored_folder,
    parse_iteration,
    point_to,
    read_pointer_text,
)
from megatron.checkpoint.lease import STALE_SECONDS, Lease, get_heartbeat_age, is_alive, read_holder
from megatron.checkpoint.lineage import write_lineage
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.extras.operations.rollback import cutting
from megatron.extras.operations.rollback.rollback_plan import (
    PLAN,
    ROLLED_BACK,
    FileCut,
    RollbackPlan,
    RollbackRequest,
    explain_manual_fix,
    find_cut,
    gather_facts,
    list_later_entries,
    make_plan,
    read_target,
)

INTERVENTIONS = "interventions.jsonl"
"""File in the run's folder with one JSON line for each intervention."""
_PREPARING = ".preparing"
"""Folder of a plan until `latest` names it."""
_UNFINISHED = re.compile(r"rollback (\S+) to global_step\d+ is unfinished; .*")
"""Text of `latest` while a rollback is unfinished. The group is the plan's name."""


def roll_back(
    root: Path, request: RollbackRequest, log: Callable[[str], None], *, dry_run: bool = False
) -> None:
    """Take a run back, or continue the same rollback after an interruption.

    Args:
        root: The run's folder (its --save).
        request: What to do.
        log: Function that prints a line.
        dry_run: Only print what would be done.

    Raises:
        OperationsError, CheckpointError, ConfigError: The rollback is refused. Nothing was changed,
            or the rollback can be continued.
        OSError: A disk is full or does not answer. The same command continues.
    """
    _refuse_active_run(root, log, dry_run=dry_run)
    if dry_run:
        plan, cuts = _plan(root, request)
        _report_plan(root, plan, log, started=cuts is None)
        log("nothing was changed (--dry-run)")
        _report_how_to_continue(plan, log)
        return
    if find_unfinished(root) is None:
        # Most mistakes show here, before anything is written.
        gather_facts(root, request)
    # While the lease is held, a run that starts here is refused.
    lease = _acquire(root, log)
    try:
        plan = roll_back_within_run(root, request, lease, log)
    finally:
        lease.release()
    _report_how_to_continue(plan, log)


def roll_back_within_run(
    root: Path, request: RollbackRequest, lease: Lease, log: Callable[[str], None]
) -> RollbackPlan:
    """Roll back a run whose lease is held, or continue the same rollback. Return the plan.

    Args:
        root: The run's folder. Nothing in it is open for writing.
        request: What to do.
        lease: The lease of the folder.
        log: Function that prints a line.

    Raises:
        OperationsError, CheckpointError, ConfigError, OSError: See `roll_back`.
    """
    # The plan is made under the lease, because a run may save a checkpoint before that.
    plan, cuts = _plan(root, request)
    _report_plan(root, plan, log, started=cuts is None)
    if not plan.is_empty:
        execute_plan(root, plan, cuts or {}, lease, log)
        log(f"done: {root} is at global_step{plan.to}")
    return plan


def roll_back_address(
    address: str,
    make_request: Callable[[Path], RollbackRequest],
    log: Callable[[str], None],
    *,
    dry_run: bool,
) -> None:
    """Roll back a run on an object store. One write makes it visible.

    Args:
        address: The run's address.
        make_request: Returns what to do, for a temporary folder that mirrors the run.
        log: Function that prints a line.
        dry_run: Only print what would be done.

    Raises:
        MegatronError: The rollback is not allowed or failed. Nothing has changed then.
    """
    # It imports torch, which a rollback of a folder does not need.
    from megatron.extras.object_store.addresses import open_for_change

    with open_for_change(address, log, dry_run=dry_run) as (root, lease):

        def show(line: str) -> None:
            log(line.replace(str(root), address))

        request = make_request(root)
        if lease is None:
            roll_back(root, request, show, dry_run=True)
        else:
            roll_back_within_run(root, request, lease, show)


# Active runs


def _refuse_active_run(root: Path, log: Callable[[str], None], *, dry_run: bool) -> None:
    """Check that the folder is that of a run, and that no run writes to it.

    Raises:
        OperationsError: One of the two does not hold.
    """
    if not root.is_dir():
        raise OperationsError(f"{root} does not exist; give the run's folder (its --save)")
    if parse_iteration(root.name) is not None or (root / MANIFEST).is_file():
        raise OperationsError(
            f"{root} is a single checkpoint; give its run's folder, and the iteration with --to"
        )
    holder = read_holder(root)
    if holder is None:
        return
    alive = is_alive(holder)
    # None means that only a heartbeat can show it. Acquiring the lease will watch for one.
    if alive is False:
        return
    if alive:
        cancel = "end it"
        if holder.job:
            cancel = f"scancel {holder.job}"
        raise OperationsError(
            f"{root} is being written to by {holder.describe()}; {cancel}, wait until it has "
            "ended, and try again"
        )
    check_job = f", or check that squeue does not list job {holder.job}" * bool(holder.job)
    log(
        f"{root} was written to by {holder.describe()}. From this host only its heartbeat shows "
        "whether it is alive. The last heartbeat was "
        f"{max(0.0, get_heartbeat_age(root)):.0f} s ago. The heartbeat is watched for "
        f"{STALE_SECONDS:g} s before anything is changed. To be sure at once, give this command on "
        f"{holder.host}{check_job}."
    )
    if dry_run:
        log("(--dry-run does not watch it)")


def _acquire(root: Path, log: Callable[[str], None]) -> Lease:
    """Acquire the lease of the folder. Raise OperationsError if a run holds it."""
    try:
        return Lease.acquire(root, log)
    except CheckpointError as error:
        raise OperationsError(f"no rollback while a run is active: {error}") from error


# New and unfinished plans


def _plan(
    root: Path, request: RollbackRequest
) -> tuple[RollbackPlan, dict[str, cutting.CutSpans] | None]:
    """Return the plan, and where each file is to be cut.

    The second value is None if the rollback was already started. Some files are cut by then, so the
    places have to be found again.
    """
    started = find_unfinished(root)
    if started is not None:
        # Two rollbacks at once would mix their records, so the unfinished one must be completed
        # first.
        _refuse_another(root, request, started)
        # The plan is only valid for the checkpoint that it was made for.
        if read_target(root, started.to)[0].digest != started.digest:
            raise OperationsError(
                f"global_step{started.to} is not the one that the rollback was started for; "
                f"{explain_manual_fix(root)}"
            )
        return started, None
    return make_plan(root, request)


def find_unfinished(root: Path) -> RollbackPlan | None:
    """Return the plan of the rollback that `latest` calls unfinished, or None if there is none.

    Raises:
        OperationsError: The plan is damaged or missing.
    """
    pointer = root / LATEST
    match = _UNFINISHED.fullmatch(read_pointer_text(pointer) or "")
    if match is None:
        return None
    # `latest` is written before the folder gets its final name, so the plan may be in either one.
    for folder in (root / ROLLED_BACK / match[1], root / ROLLED_BACK / _PREPARING):
        try:
            plan = RollbackPlan.parse_json(load_text(folder / PLAN))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError, KeyError) as damage:
            raise OperationsError(
                f"{folder / PLAN} is damaged: {damage}; {explain_manual_fix(root)}"
            ) from damage
        # The preparing folder may hold the plan of another rollback that was never started.
        if plan.name == match[1]:
            return plan
    raise OperationsError(
        f"{pointer} names an unfinished rollback, but its plan "
        f"{root / ROLLED_BACK / match[1] / PLAN} does not exist; {explain_manual_fix(root)}"
    )


def _refuse_another(root: Path, request: RollbackRequest, plan: RollbackPlan) -> None:
    """Check that a request is the one of the unfinished rollback.

    A value that is not given again counts as unchanged.

    Raises:
        OperationsError: A value differs.
    """
    given = request.convert_to_record()
    default = RollbackRequest(request.to).convert_to_record()
    asked = plan.request
    differing = [
        name
        for name in given
        # Only `to` has no default, so a difference in it always counts.
        if given[name] != asked[name] and (name == "to" or given[name] != default[name])
    ]
    if differing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
        raise OperationsError(
            f"the rollback to global_step{plan.to} of {plan.time} was interrupted and must be "
            f"finished first; this command differs in {names}. "
            f"Give\n  {_format_command(root, plan.to)}\nand then this command again"
        )


def _format_command(root: Path, to: int) -> str:
    """Return the command that continues a rollback."""
    return f"python tools/rollback.py {shlex.quote(str(root))} --to {to}"


def _report_plan(
    root: Path, plan: RollbackPlan, log: Callable[[str], None], *, started: bool
) -> None:
    """Print what the plan does."""
    aside = root / ROLLED_BACK / plan.name
    if plan.is_empty:
        log(f"{root} is at global_step{plan.to}, and nothing is later: there is nothing to do")
        return
    if started:
        log(
            f"continuing the rollback of {plan.time}, which was interrupted; some of the following "
            "steps are done already"
        )
    beyond = f", trained to {plan.trained_to}," * (plan.trained_to > plan.stood_at)
    log(
        f"{root}: from global_step{plan.stood_at}{beyond} back to global_step{plan.to}; what is "
        f"removed is kept in {aside}"
    )
    for name in plan.checkpoints:
        log(f"  {name} is moved there")
    for file in plan.files:
        log(f"  {file.path}: cut {file.said} -> {file.part}")
    if plan.pointers:
        log(f"  {LATEST}, {LATEST_ITERATION} and course.json name global_step{plan.to}")
    noted = [str(root / INTERVENTIONS)]
    if plan.chronicles:
        noted.append(plan.chronicles)
    log(f"  a note is added to {' and '.join(noted)}")


def _report_how_to_continue(plan: RollbackPlan, log: Callable[[str], None]) -> None:
    """Print the flags to continue the run with, and the notes."""
    more = f" and these flags:\n  {plan.flags}" * bool(plan.flags)
    log(f"continue with the run's own command{more}")
    for note in plan.notes:
        log(f"note: {note}")


# Execution


def execute_plan(
    root: Path,
    plan: RollbackPlan,
    cuts: Mapping[str, cutting.CutSpans],
    lease: Lease,
    log: Callable[[str], None],
) -> None:
    """Execute a plan, or what is left of it. Each step may be repeated.

    Args:
        root: The run's folder.
        plan: What to do.
        cuts: Path -> where it is to be cut. The others are found when their turn comes.
        lease: The lease of the folder.
        log: Function that prints a line.

    Raises:
        OperationsError: Somebody writes to a file.
        CheckpointError: A run took the folder over.
        OSError: A disk is full or does not answer.
    """
    folder = root / ROLLED_BACK / plan.name
    # A process that was suspended may have lost its lease, so each step confirms it first.
    lease.confirm()
    _begin(root, plan, lease)
    # If somebody removes `latest`, a start uses this pointer.
    replace_file(root / LATEST_ITERATION, str(plan.to), lease.confirm)
    # This copy of the lineage is used if the manifest of the checkpoint is damaged.
    write_lineage(root, read_manifest(find_stored_folder(root, plan.to)), lease.confirm)
    for file in plan.files:
        lease.confirm()
        _cut_file(plan, file, cuts, folder, log)
    _move_later(root, plan.to, folder, lease)
    lease.confirm()
    _note(root / INTERVENTIONS, plan, _format_intervention(plan))
    if plan.chronicles is not None:
        lease.confirm()
        _note(Path(plan.chronicles), plan, _format_chronicle_entry(plan))
    # `latest` is freed last. Until then no run can start from a folder that is half rolled back.
    point_to(root, plan.to, lease.confirm)


def _begin(root: Path, plan: RollbackPlan, lease: Lease) -> None:
    """Write the plan, and then the text in `latest` that names it and prevents every start."""
    preparing = root / ROLLED_BACK / _PREPARING
    folder = root / ROLLED_BACK / plan.name
    named = _UNFINISHED.fullmatch(read_pointer_text(root / LATEST) or "")
    # A rollback that is continued has its plan already.
    if named is None or named[1] != plan.name:
        preparing.mkdir(parents=True, exist_ok=True)
        # The plan must be on the disk before `latest` names it.
        write_file(preparing / PLAN, plan.dump_json())
        sync_folder(preparing)
        sync_folder(root / ROLLED_BACK)
        sync_folder(root)
        text = (
            f"rollback {plan.name} to global_step{plan.to} is unfinished; give again: "
            f"{_format_command(root, plan.to)}"
        )
        replace_file(root / LATEST, text, lease.confirm)
    if not folder.exists():
        os.rename(preparing, folder)
        sync_folder(folder.parent)


def _cut_file(
    plan: RollbackPlan,
    file: FileCut,
    cuts: Mapping[str, cutting.CutSpans],
    folder: Path,
    log: Callable[[str], None],
) -> None:
    """Cut one file, unless it is already gone."""
    path = Path(file.path)
    # The complete file may have been moved by an earlier try of this step.
    if not path.exists():
        if not (folder / file.part).exists():
            log(f"{path} was removed after the rollback was planned; nothing was cut")
        return
    # After an interruption the places are found in the file as it is now.
    cut = cuts.get(file.path) or find_cut(file.kind, path, plan.axes)
    cutting.cut_out(path, folder / file.part, cut, f".rollback.{plan.name}")


def _move_later(root: Path, to: int, folder: Path, lease: Lease) -> None:
    """Move the later checkpoints to the rollback's folder."""
    for entry in list_later_entries(root, to):
        # lexists also finds a broken link, which exists() does not.
        unused = cutting.find_unused_name(entry.name, lambda name: os.path.lexists(folder / name))
        lease.confirm()
        if entry.is_symlink() and not os.path.isabs(os.readlink(entry)):
            # A relative link would lead elsewhere from another folder. It is replaced by an
            # absolute one first.
            absolute = os.path.join(root.absolute(), os.readlink(entry))
            fresh = root / f".{entry.name}.rollback"
            fresh.unlink(missing_ok=True)
            os.symlink(absolute, fresh)
            os.replace(fresh, entry)
        os.rename(entry, folder / unused)
    sync_folder(folder)
    sync_folder(root)


def _format_intervention(plan: RollbackPlan) -> str:
    """Return the JSON line that records the rollback."""
    asked = plan.request
    record = {
        "time": plan.time,
        "action": "rollback",
        "from": plan.stood_at,
        "trained_to": plan.trained_to,
        "to": plan.to,
        **{name: asked[name] for name in ("reason", "skip", "lr", "override_lr_scheduler")},
        "flags": plan.flags,
        "parts": f"{ROLLED_BACK}/{plan.name}",
        "checkpoints": plan.checkpoints,
        "files": [asdict(file) for file in plan.files],
    }
    return json.dumps(record) + "\n"


def _format_chronicle_entry(plan: RollbackPlan) -> str:
    """Return the entry of the chronicles in Markdown."""
    written = datetime.fromisoformat(plan.time).strftime("%Y-%m-%d %H:%M UTC")
    trained = f" (trained to {plan.trained_to})" * (plan.trained_to > plan.stood_at)
    reason = " ".join(plan.request["reason"].split()) or "not given"
    lines = [
        f"## {written}: rolled back from iteration {plan.stood_at}{trained} to {plan.to}",
        "",
        f"- Reason: {reason}",
    ]
    if plan.request["skip"]:
        lines.append(f"- Skipped from there: {' '.join(plan.request['skip'])}")
    if plan.flags:
        lines.append(f"- Flags to continue with: `{plan.flags}`")
    lines.append(f"- What was removed is kept in `{ROLLED_BACK}/{plan.name}/`")
    return "\n".join(lines) + "\n"


def _note(path: Path, plan: RollbackPlan, entry: str) -> None:
    """Append an entry to a file once, on a line of its own."""
    before = b""
    if path.exists():
        before = load_bytes(path)
    # This step may be repeated. The entry holds the time of the plan, so it is unique.
    if entry.encode() in before:
        return
    # An earlier writer may have been cut off within a line.
    gap = b""
    if before and not before.endswith(b"\n"):
        gap = b"\n"
    if before and entry.startswith("#"):
        gap += b"\n"
    cutting.replace_by(path, [before + gap + entry.encode()], f".rollback.{plan.name}")
