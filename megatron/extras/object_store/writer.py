"""The two objects that decide who writes to an address: `lease.json` and `latest.json`.

The object `lease.json` names the writer. The writer renews it with a conditional write, so its tag
changes. Another run takes it over if the writer's process is known to be gone, or if the tag has
not changed for STALE_SECONDS by that run's own clock. Clocks are never compared. Each takeover has
a higher generation. The lease only makes conflicts rare and their messages clear.

The object `latest.json` alone decides what is visible. It holds what the small files of a run's
folder hold on a disk: the newest checkpoint, the lineage, and which objects belong to each
checkpoint. Each write is conditional on the tag of the content that the writer knows, and has the
generation of the writer's lease. A run that takes the lease over writes its generation first. From
then on no write of an earlier run succeeds.

Invariant: no name in `latest.json` leads out of a folder.
"""

import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.base.outside_file import parse_json
from megatron.checkpoint import lease
from megatron.checkpoint.lease import (
    Lease,
    LeaseHolder,
    LeasePlace,
    Look,
    may_take_over,
    parse_holder,
)
from megatron.extras.object_store.objects import ObjectFolder, StaleTagError, TaggedObject

KEY = "latest.json"
LEASE_KEY = "lease.json"
_FRESH_SECONDS = 1.0
"""A lease that was renewed so recently is not renewed again."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*", re.ASCII)
"""A part of the path of a folder."""
_OBJECTS = re.compile(r"global_step\d{1,15}-(\d{1,15})-[0-9a-f]{8}-\d{1,9}", re.ASCII)
"""What the keys of a checkpoint begin with. The group is the generation of its writer."""


@dataclass(frozen=True)
class RootRecord:
    """The content of the object."""

    generation: int = 0
    """Generation of its writer's lease."""
    latest: str | None = None
    """Text of the pointer `latest`. None before the first checkpoint."""
    lineage: str | None = None
    """Text of the file `course.json`."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folder of a checkpoint, as `global_step300` -> what the keys of its objects begin with."""
    nonce: str = ""
    """Makes the content, and so the tag, of each write different."""


def find_generation(key: str) -> int | None:
    """Return the generation of the writer of a checkpoint's object, or None for other keys."""
    match = _OBJECTS.fullmatch(key.partition("/")[0])
    return int(match[1]) if match else None


class RootObject:
    """The object of one address, as this process last read or wrote it."""

    def __init__(self, objects: ObjectFolder) -> None:
        """Create it unread."""
        self.objects = objects
        self._tag: str | None = None
        self.record = RootRecord()
        self.exists = False

    def read(self) -> RootRecord:
        """Read the object, and return its content. It is empty if the object does not exist.

        Raises:
            CheckpointError: This program did not write its content.
            OSError: It cannot be read.
        """
        found = self.objects.read_tagged(KEY)
        self.exists = found is not None
        # Without a tag, the next write needs that there is no object.
        self._tag = None if found is None else found.tag
        self.record = RootRecord() if found is None else self._parse(found.body)
        return self.record

    def seize(self, generation: int) -> RootRecord:
        """Write the generation of this run's lease. Return the content as it was before.

        Raises:
            CheckpointError: A later run is the writer.
            OSError: It cannot be written.
        """
        while True:
            before = self.read()
            # This run lost the lease before its first write.
            if before.generation > generation:
                raise CheckpointError(self._describe_loss(before.generation))
            try:
                self.write(replace(before, generation=generation))
            except StaleTagError:
                # The earlier writer has published in the meantime.
                continue
            return before

    def write(self, record: RootRecord) -> None:
        """Replace the object, unless somebody wrote it since this process read or wrote it.

        Raises:
            StaleTagError: Somebody has.
            OSError: It cannot be written. It may have been written nevertheless.
        """
        # Stores compute tags from the content, so an equal content would have an old tag.
        record = replace(record, nonce=uuid.uuid4().hex)
        text = json.dumps({"format": 1, **asdict(record)}, indent=1) + "\n"
        self._tag = self.objects.write_if(KEY, text.encode(), self._tag)
        self.record = record
        self.exists = True

    def publish(self, record: RootRecord) -> None:
        """Write as `write`, for the holder of the lease.

        Raises:
            CheckpointError: A later run is the writer.
            OSError: It cannot be written.
        """
        try:
            self.write(record)
        except StaleTagError:
            found = RootObject(self.objects)
            # An earlier attempt of this run may have been written after its error was reported.
            if found.read().generation != record.generation:
                loss = self._describe_loss(found.record.generation)
                if not found.exists:
                    loss = f"{self.objects.name(KEY)} was deleted; this run ends"
                raise CheckpointError(loss) from None
            # Generations are unique, so the present content is this run's own.
            self._tag = found._tag
            self.write(record)

    def _describe_loss(self, generation: int) -> str:
        return (
            f"{self.objects.name(KEY)} was taken over by a later run (generation {generation}); "
            "this run ends, and nothing of it becomes visible there"
        )

    def _parse(self, body: bytes) -> RootRecord:
        try:
            found = parse_json(body)
            # A later version may mean something else by the same fields.
            if found.pop("format") != 1:
                raise ValueError("its format is not 1")
            record = RootRecord(**found)
            texts = (record.latest, record.lineage)
            valid = (
                isinstance(record.generation, int)
                and all(text is None or isinstance(text, str) for text in texts)
                and all(_is_safe(name, keys) for name, keys in record.folders.items())
            )
            if not valid:
                raise ValueError("it has a name or a value that no writer gives")
        except (ValueError, TypeError, KeyError, AttributeError) as damage:
            raise CheckpointError(
                f"{self.objects.name(KEY)} is not what was written: {damage}. Restore an earlier "
                "version of the object, if the bucket keeps versions"
            ) from damage
        return record


def _is_safe(name: object, keys: object) -> bool:
    """Return whether a folder and its keys have names that a writer gives."""
    if not isinstance(name, str) or not isinstance(keys, str) or not _OBJECTS.fullmatch(keys):
        return False
    return all(_NAME.fullmatch(part) for part in name.split("/"))


class StoreLease(Lease):
    """The lease of a local folder and of an address."""

    _objects: ObjectFolder | None = None
    _tag: str | None = None
    _renewed = 0.0
    at_release: Callable[[], None] = staticmethod(lambda: None)
    """Called before the release, while nobody else writes. It may raise OSError."""
    generation = 0
    """Number of this writer. It is higher than that of all earlier ones."""

    @classmethod
    def acquire_both(
        cls, root: Path, objects: ObjectFolder, known: int, log: Callable[[str], None]
    ) -> "StoreLease":
        """Become the writer of an address.

        Args:
            root: The local folder of the run.
            objects: The address.
            known: The generation in `latest.json`.
            log: Called with messages for people.

        Raises:
            CheckpointError: Another run is the writer.
            OSError: The folder or the store cannot be written.
        """
        # The lease of the local folder comes first, because two runs on a host must not share it.
        own = cls.acquire(root, log)
        assert isinstance(own, cls)
        try:
            # The heartbeat of the local lease runs during the wait for the other one.
            own._acquire_object(objects, known, log)
        except BaseException:
            own.release()
            raise
        return own

    def confirm(self) -> None:
        """Check that this run is still the writer, and renew the lease. See `Lease.confirm`."""
        super().confirm()
        if self._objects is None:
            return
        with self._lock:
            if self._objects is None or time.monotonic() - self._renewed < _FRESH_SECONDS:
                return
            try:
                self._write()
            except StaleTagError:
                found = self._objects.read_tagged(LEASE_KEY)
                other = _read_holder(found)
                if found is not None and other is not None and other.token == self._holder.token:
                    # A renewal was written after its error was reported.
                    self._tag = found.tag
                    return
                who = "another run" if other is None else other.describe()
                name = self._objects.name(LEASE_KEY)
                self.lost = (
                    f"{self._objects.address} was taken over by {who}, because this process did "
                    f"not renew {name} for {lease.STALE_SECONDS:g} s; it ends, and nothing that it "
                    "uploads becomes visible"
                )
                if found is None:
                    self.lost = f"{name} was deleted, perhaps with its bucket; this run ends"
                raise CheckpointError(self.lost) from None

    def release(self) -> None:
        """Release both leases. See `Lease.release`."""
        super().release()
        if self._objects is None or self.busy or self.lost is not None:
            return
        # What this upload lacks is in the local folder, and an error must not keep the lease.
        with contextlib.suppress(OSError, CheckpointError):
            self.at_release()
        # If this fails, the next run waits until the lease is stale.
        with contextlib.suppress(OSError), self._lock:
            self._write(released=True)
        self._objects = None

    def _acquire_object(
        self, objects: ObjectFolder, known: int, log: Callable[[str], None]
    ) -> None:
        """Take the object over, or create it."""
        self._lock = threading.Lock()
        while True:
            found = objects.read_tagged(LEASE_KEY)
            if not _is_released(found) and not self._is_holder_gone(objects, found, log):
                continue
            self.generation = max(known, _parse(found).get("generation", 0)) + 1
            self._tag = None if found is None else found.tag
            # The heartbeat of the local lease runs already, and must not write at the same time.
            with self._lock:
                self._objects = objects
                try:
                    self._write()
                    return
                except StaleTagError:
                    # Another run was faster. It is alive, so the next pass refuses.
                    self._objects = None

    def _is_holder_gone(
        self, objects: ObjectFolder, found: TaggedObject | None, log: Callable[[str], None]
    ) -> bool:
        """Return whether the holder of the object is gone. If not, the object is read again.

        Raises:
            CheckpointError: The holder is alive.
        """

        def look() -> Look:
            now = objects.read_tagged(LEASE_KEY)
            if _is_released(now):
                return "again"
            # The tag is compared, and no time, so clocks do not matter.
            same = now is not None and found is not None and now.tag == found.tag
            return "same" if same else "alive"

        place = LeasePlace(
            objects.name(LEASE_KEY),
            objects.address,
            "address",
            "a renewal",
            "at one address would replace",
        )
        return may_take_over(place, _read_holder(found), self._holder, look, log)

    def _write(self, *, released: bool = False) -> None:
        assert self._objects is not None
        record = {
            "generation": self.generation,
            "holder": None if released else asdict(self._holder),
            # So that each renewal changes the tag, also if nothing else changes.
            "nonce": uuid.uuid4().hex,
        }
        body = (json.dumps(record, indent=1) + "\n").encode()
        self._tag = self._objects.write_if(LEASE_KEY, body, self._tag)
        self._renewed = time.monotonic()


def _parse(found: TaggedObject | None) -> dict[str, Any]:
    """Return the record in a lease object. It is empty if the object is missing or damaged."""
    if found is None:
        return {}
    try:
        record = parse_json(found.body)
    except ValueError:
        return {}
    if isinstance(record, dict) and isinstance(record.get("generation"), int):
        return record
    return {}


def _read_holder(found: TaggedObject | None) -> LeaseHolder | None:
    return parse_holder(_parse(found).get("holder"))


def _is_released(found: TaggedObject | None) -> bool:
    return found is None or _parse(found).get("holder", "") is None
