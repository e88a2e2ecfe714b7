"""The object `latest.json` of a run, which alone decides what is visible.

It holds what the small files of a run's folder hold on a disk: the newest checkpoint, the
lineage, and which objects belong to each checkpoint. Each write is conditional on the tag of the
content that the writer knows, and has the generation of the writer's lease. A run that takes the
lease over writes its generation first. From then on no write of an earlier run succeeds.

Invariant: no name in it leads out of a folder.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from megatron.base.errors import CheckpointError
from megatron.base.outside_file import parse_json
from megatron.extras.object_store.objects import ObjectFolder, StaleTagError

KEY = "latest.json"
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
