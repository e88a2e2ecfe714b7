"""The lease of an address, which prevents most conflicts between two writers.

The object `lease.json` names the writer. The writer renews it with a conditional write, so its tag
changes. Another run takes it over if the writer's process is known to be gone, or if the tag has
not changed for STALE_SECONDS by that run's own clock. Clocks are never compared.

Each takeover has a higher generation. The lease only makes conflicts rare and their messages clear.
The generation in `latest.json` decides what becomes visible, see `root_object.py`.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
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

KEY = "lease.json"
_FRESH_SECONDS = 1.0
"""A lease that was renewed so recently is not renewed again."""


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
                found = self._objects.read_tagged(KEY)
                other = _read_holder(found)
                if found is not None and other is not None and other.token == self._holder.token:
                    # A renewal was written after its error was reported.
                    self._tag = found.tag
                    return
                who = "another run" if other is None else other.describe()
                name = self._objects.name(KEY)
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
            found = objects.read_tagged(KEY)
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
            now = objects.read_tagged(KEY)
            if _is_released(now):
                return "again"
            # The tag is compared, and no time, so clocks do not matter.
            same = now is not None and found is not None and now.tag == found.tag
            return "same" if same else "alive"

        place = LeasePlace(
            objects.name(KEY),
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
        self._tag = self._objects.write_if(KEY, body, self._tag)
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
