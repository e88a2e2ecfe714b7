"""The copy of a run's small files in a local folder, in which the trainer finds and manages them.

`pull` makes a folder look as one on a disk: pointers, lineage, and each checkpoint's manifest and
configuration. Its large files have the sizes of their objects and no content. So a missing object
is a missing file. `collect` returns what the folder shows, for the object `latest.json`.

Each folder of a checkpoint has a file that says which objects are its own. A rename keeps it.

Invariant: `pull` removes only folders that have this file.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file, replace_file_by
from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.outside_file import POINTER_BYTES, SETTINGS_BYTES, load_text
from megatron.checkpoint.folder import (
    DELETING,
    LATEST,
    LATEST_ITERATION,
    REPLACED,
    UNFINISHED,
    parse_iteration,
)
from megatron.checkpoint.lineage import LINEAGE_FILE, UNPUBLISHED_FILE
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, is_plain_name, read_manifest
from megatron.extras.object_store.objects import ObjectFolder
from megatron.extras.object_store.writer import RootRecord

MARKER = "stored_as"
"""File with the address of a checkpoint's objects, in its folder."""
WRITER_FILE = "last_writer"
"""File with the address and the generation of the last writer that used a local folder."""
RECORDS = "local/"
"""What the keys of the files of a local folder begin with."""
DECISIONS = "interventions.jsonl"
"""File of the spike guard's decisions, which a start needs before it takes the lease."""
STAGING = "staging"
_RECORD = re.compile(
    r"[^/]+\.jsonl|chronicles\.md|predicted_loss\.json|verification\.json|tracker-[^/]+\.json"
    r"|(hangs|profile|wandb)/.+|rolled-back/[^/]+/(tensorboard/)?[^/]+"
    r"|(?!global_step|loaded-|staging/|rolled-back/)"
    r"(.*/)?(events\.out\.tfevents\.[^/]+|emissions\.csv)"
)
"""Paths of the records in a local folder, see docs/run_folder.md. Nothing else is uploaded there or
downloaded, so that no pointer of a copied folder takes the place of `latest.json`."""


class Mirror:
    """A local folder that mirrors an address."""

    def __init__(self, objects: ObjectFolder, root: Path, *, with_indices: bool = False) -> None:
        """Create the mirror without reading anything.

        Args:
            objects: The address.
            root: The local folder.
            with_indices: `pull` also downloads the indices of tensors, which may be large.
        """
        self._downloaded = (MANIFEST, CONFIG, INDEX) if with_indices else (MANIFEST, CONFIG)
        self.objects = objects
        self.root = root
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Name of a record -> its size and modification time when it was uploaded."""

    def pull(self, record: RootRecord, log: Callable[[str], None]) -> None:
        """Make the folder show what a record says.

        Args:
            record: The content of `latest.json`.
            log: Called with warnings that name objects.

        Raises:
            CheckpointError: The folder has checkpoints of another run.
            OSError: The store cannot be read, or the folder cannot be written.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign_folder()
        if not self._is_last_writer(record.generation) or self._read(LATEST) != record.latest:
            # A rollback may have been decided on another host, or done here and not made visible.
            with contextlib.suppress(FileNotFoundError):
                self._download(RECORDS + DECISIONS, self.root / DECISIONS)
        for name, keys in self._list_mirrored().items():
            # Another run has removed or renamed it, or it is left from a save that was killed.
            if record.folders.get(name) != keys:
                shutil.rmtree(self.root / name)
        # One listing for all checkpoints. A request for each file would take long.
        sizes: dict[str, dict[str, int]] = {}
        for key, size in self.objects.list("global_step").items():
            folder, _, name = key.partition("/")
            sizes.setdefault(folder, {})[name] = size
        copies: list[tuple[str, Path]] = []
        for name, keys in record.folders.items():
            copies += self._prepare_folder(self.root / name, keys, sizes.get(keys, {}))
        # All of them again, because a disk may have damaged the copies of an earlier start.
        for _ in self.objects.run_parallel(lambda copy: self._download(*copy), copies):
            pass
        for name, keys in record.folders.items():
            self._complete_folder(self.root / name, keys, sizes.get(keys, {}), log)
        (self.root / UNPUBLISHED_FILE).unlink(missing_ok=True)
        number = None if record.latest is None else parse_iteration(record.latest.strip())
        texts = {
            LATEST_ITERATION: None if number is None else str(number),
            LINEAGE_FILE: record.lineage,
            LATEST: record.latest,
        }
        # `latest` comes last, because it decides.
        for file, text in texts.items():
            if text is None:
                (self.root / file).unlink(missing_ok=True)
            else:
                replace_file(self.root / file, text)

    def collect(self, before: RootRecord) -> RootRecord:
        """Return the record of what the folder shows now.

        A folder that has disappeared stays in the record. Somebody may have emptied the local
        folder, and no checkpoint may be lost for that. `ObjectStore.clean_up` removes folders.

        Args:
            before: The present record.
        """
        passing = (UNFINISHED, DELETING, REPLACED)
        mirrored = self._list_mirrored().items()
        shown = {name: keys for name, keys in mirrored if not name.endswith(passing)}
        # A folder that was renamed has its objects under its new name only.
        kept = {name: keys for name, keys in before.folders.items() if keys not in shown.values()}
        latest, lineage = self._read(LATEST), self._read(LINEAGE_FILE)
        return replace(before, latest=latest, lineage=lineage, folders={**kept, **shown})

    def mark(self, folder: Path, keys: str) -> None:
        """Record in a folder which objects are its own."""
        # A file in the folder, because a rename of the folder must keep it.
        replace_file(folder / MARKER, self.objects.name(keys) + "\n")

    def find_keys(self, folder: Path) -> str | None:
        """Return what the keys of a folder's objects begin with. None if it has no marker.

        Raises:
            CheckpointError: It is of another address.
        """
        try:
            address = load_text(folder / MARKER, POINTER_BYTES, decoding="replace").strip()
        except FileNotFoundError:
            return None
        parent, _, keys = address.rpartition("/")
        # In the folder of this address, the marker is damaged.
        if parent != self.objects.address and not self._is_own():
            raise CheckpointError(
                f"{folder} shows a checkpoint of {parent}, and this run is at "
                f"{self.objects.address}. Give each run a --local-dir of its own"
            )
        return keys

    def _is_own(self) -> bool:
        """Return whether the folder belongs to this address, whatever its checkpoints say."""
        # The name of a folder that is only loaded from has the digest of the address.
        is_loaded = self.root.name.startswith("loaded-")
        return is_loaded or self._read_writer().startswith(f"{self.objects.address} ")

    def _is_last_writer(self, generation: int) -> bool:
        """Return whether the writer with this generation has used this folder."""
        return self._read_writer() == f"{self.objects.address} {generation}\n"

    def _read_writer(self) -> str:
        path = self.root / WRITER_FILE
        if not path.is_file():
            return ""
        return load_text(path, POINTER_BYTES, decoding="replace")

    def make_placeholder(self, path: Path, size: int) -> None:
        """Give a file its size without its content, which takes no space on the disk."""
        if path.exists() and path.stat().st_size == size:
            return
        with open(path, "wb") as file:
            # The file system stores no block of it.
            file.truncate(size)

    def push_records(self, *, exact: bool = False) -> None:
        """Upload the files of the folder that have changed: metrics, chronicle, events.

        With `exact`, files that the folder does not have are deleted from the store.

        Raises:
            OSError: One cannot be read or written.
        """
        paths = self._list_records()
        for path in paths:
            status = path.stat()
            name = path.relative_to(self.root).as_posix()
            facts = (status.st_size, status.st_mtime_ns)
            # Otherwise each save would upload all events and traces again.
            if self._uploaded.get(name) != facts:
                self.objects.upload(path, RECORDS + name)
                self._uploaded[name] = facts
        if exact:
            kept = {RECORDS + path.relative_to(self.root).as_posix() for path in paths}
            self.objects.delete(self.objects.list(RECORDS).keys() - kept)

    def pull_records(self, generation: int, writer: int, log: Callable[[str], None]) -> None:
        """Download the files that another host has uploaded, so that this one continues them.

        Args:
            generation: That of the last writer of the address. If it has used this folder, the
                files here are newer, because some lines were written after the last upload.
            writer: The generation of this run, which uses the folder from now on.
            log: Called with warnings.

        Raises:
            OSError: One cannot be read or written.
        """
        keys: Iterable[str] = ()
        if not self._is_last_writer(generation):
            keys = self.objects.list(RECORDS)
        foreign = []
        for key in keys:
            name = key.removeprefix(RECORDS)
            if _RECORD.fullmatch(name) and all(is_plain_name(part) for part in name.split("/")):
                self._download(key, self.root / name)
            else:
                foreign.append(key)
        if foreign:
            log(
                f"warning: {self.objects.name(foreign[0])!a} is no record of a run. It and "
                f"{len(foreign) - 1} other objects there are left out"
            )
        replace_file(self.root / WRITER_FILE, f"{self.objects.address} {writer}\n")

    def _refuse_foreign_folder(self) -> None:
        """Raise CheckpointError if the folder has checkpoints that are not of this address."""
        for entry in self.root.iterdir():
            if parse_iteration(entry.name) is not None and not (entry / MARKER).is_file():
                raise CheckpointError(
                    f"--local-dir {self.root} holds the checkpoint {entry.name}, which no run has "
                    f"stored at {self.objects.address}. Give a folder of its own"
                )

    def _list_mirrored(self) -> dict[str, str]:
        """Return the folders with a marker: path in the root -> what their keys begin with."""
        found = {}
        for pattern in (f"global_step*/{MARKER}", f"rolled-back/*/global_step*/{MARKER}"):
            for path in sorted(self.root.glob(pattern)):
                keys = self.find_keys(path.parent)
                if keys is not None:
                    found[path.parent.relative_to(self.root).as_posix()] = keys
        return found

    def _prepare_folder(
        self, folder: Path, keys: str, sizes: Mapping[str, int]
    ) -> list[tuple[str, Path]]:
        """Make the folder of a checkpoint with its marker. Return what is to be downloaded."""
        folder.mkdir(parents=True, exist_ok=True)
        self.mark(folder, keys)
        for entry in folder.iterdir():
            # A copy of an earlier start must not hide that its object is gone.
            if entry.name not in sizes and entry.name != MARKER:
                entry.unlink()
        if sizes.get(CONFIG, 0) > SETTINGS_BYTES:
            self.make_placeholder(folder / CONFIG, sizes[CONFIG])
            sizes = {name: size for name, size in sizes.items() if name != CONFIG}
        return [(f"{keys}/{name}", folder / name) for name in self._downloaded if name in sizes]

    def _complete_folder(
        self, folder: Path, keys: str, sizes: Mapping[str, int], log: Callable[[str], None]
    ) -> None:
        """Give the large files of a checkpoint their sizes, and log what is missing."""
        try:
            files = read_manifest(folder).files
        except DamagedError as damage:
            problems = [f"{MANIFEST}: {damage}"]
        except CheckpointError:
            # Its format is unknown. The loader explains that.
            return
        else:
            problems = _find_problems(files, sizes)
            # Foreign objects among those of the checkpoint are not shown.
            for name in files.keys() & sizes.keys() - {*self._downloaded}:
                self.make_placeholder(folder / name, sizes[name])
        for problem in problems:
            log(
                f"warning: {self.objects.name(keys)}/{problem}. Restore the object from a "
                "version or a copy. Otherwise an older checkpoint is used"
            )

    def _list_records(self) -> list[Path]:
        """Return the files of the run that are no part of a checkpoint."""
        return [
            path
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
            and not path.is_symlink()
            and _RECORD.fullmatch(path.relative_to(self.root).as_posix())
            and not (path.parent / MARKER).exists()
        ]

    def _read(self, name: str) -> str | None:
        try:
            return load_text(self.root / name, decoding="replace")
        except FileNotFoundError:
            return None

    def _download(self, key: str, path: Path) -> None:
        """Replace a small file by an object."""
        # These files are small, except metrics of very long runs.
        body = self.objects.read(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file_by(path, lambda file: file.write(body))


def _find_problems(files: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the objects of a checkpoint, as far as their sizes show it."""
    problems = []
    for name, facts in files.items():
        if name not in sizes:
            problems.append(f"{name} does not exist")
        elif sizes[name] != facts["bytes"]:
            problems.append(f"{name} has {sizes[name]} bytes instead of {facts['bytes']}")
    return problems
