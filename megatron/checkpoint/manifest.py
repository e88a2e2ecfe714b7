"""manifest.json: what a checkpoint is, and the digest of everything in it, its own included. The last file that is written.

index.json is large and needed only by who reads tensors: where each box of each tensor lies, and the digests of the files' blocks.
See docs/checkpoint_format.md.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.digest import BLOCK, FileDigest, digest_of_file, digest_of_text
from megatron.errors import CheckpointError, DamagedError

FORMAT = 3
"""Since format 3, the state and the entries of `course` have the number of applied steps."""
_READABLE = (2, FORMAT)
APPLIED_STEPS = "applied_steps"
"""Key of `Manifest.state` that retention reads."""
MANIFEST, INDEX, CONFIG = "manifest.json", "index.json", "config.yaml"


@dataclass(frozen=True)
class Manifest:
    iteration: int
    version: str
    """Of the code that wrote it."""
    layout: str
    """What wrote it, for people; loading does not look at it."""
    state: dict[str, Any]
    """TrainState, the data's fingerprints in it."""
    optimizer: dict[str, Any] | None
    """The optimizer's scalars; None: saved without the optimizer."""
    files: dict[str, dict[str, Any]]
    """name -> {"bytes", "xxh128"} of every other file."""
    course: list[list[Any]]
    """[iteration, digest, keep, applied steps] of the checkpoints that the run came through before,
    see `lineage.py`."""
    keep: bool
    """For ever, see `lineage.LineageEntry`."""
    format: int = FORMAT
    block_bytes: int = BLOCK

    def dump_json(self) -> str:
        """JSON, with its own digest."""
        return json.dumps({**asdict(self), "digest": self.digest}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """Of the manifest itself, without this."""
        return _digest_of(asdict(self))

    @property
    def bytes(self) -> int:
        """Of all other files."""
        return sum(facts["bytes"] for facts in self.files.values())


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest_of_text(json.dumps(record, sort_keys=True))


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        DamagedError: it is missing or altered. CheckpointError: of another format, or it cannot be read.
    """
    return manifest_of_text(read_text(folder, MANIFEST), folder)


def manifest_of_text(text: str, folder: Path) -> Manifest:
    """Return what `Manifest.dump_json` wrote into `folder`.

    Raises:
        DamagedError: the text is altered. CheckpointError: it is of another format.
    """
    try:
        record = json.loads(text)
        found, digest = record.get("format"), record.pop("digest", None)
    except (ValueError, AttributeError) as damage:
        raise DamagedError(f"{MANIFEST} is not what was written: {damage}", MANIFEST) from damage
    agrees = digest == _digest_of(record)
    if (
        isinstance(found, int) and found not in _READABLE and (agrees or digest is None)
    ):  # else a flipped bit may have made the number
        way_out = (
            "update this installation"
            if found > FORMAT
            else "load it with the version that wrote it"
        )
        raise CheckpointError(
            f"{folder} has format {found}; this version reads formats {_READABLE[0]} to {FORMAT}: "
            f"{way_out}"
        )
    if not agrees:
        raise DamagedError(
            f"{MANIFEST} is not what was written: it says {digest} of itself, and is {_digest_of(record)}",
            MANIFEST,
        )
    _check_names(record)
    return Manifest(**record)


def _check_names(record: Mapping[str, Any]) -> None:
    """Check what leads to files and folders. The digest proves nothing here: whoever writes a manifest can write its digest.

    Raises:
        DamagedError: a file's name is not plain, or an iteration is no number.
    """
    files, course = record.get("files"), record.get("course")
    if not isinstance(files, dict) or not isinstance(course, list):
        raise DamagedError(
            f"{MANIFEST} is not what was written: it has no files or no course", MANIFEST
        )
    for name, facts in files.items():
        if not is_plain_name(name):
            raise DamagedError(
                f"{MANIFEST} names the file {name!a}; a checkpoint holds plain file names only, without separators or control "
                "characters: it was not written by this program, and nothing of it is read",
                MANIFEST,
            )
        if (
            not isinstance(facts, dict)
            or not is_count(facts.get("bytes"))
            or not isinstance(facts.get("xxh128"), str)
        ):
            raise DamagedError(
                f"{MANIFEST} is not what was written: {name} has no size or digest", MANIFEST
            )
    iterations = [record.get("iteration")]
    for entry in course:
        # Format 2 has three values in an entry, format 3 also the number of applied steps.
        well_formed = isinstance(entry, list) and len(entry) in (3, 4)
        iterations.append(entry[0] if well_formed else None)
    for iteration in iterations:
        if not is_count(iteration):  # it becomes a part of a folder's name
            raise DamagedError(
                f"{MANIFEST} is not what was written: {iteration!a} is no iteration", MANIFEST
            )


def is_plain_name(name: object) -> bool:
    """Return whether `name` can only be a file of the folder itself, and prints as one line."""
    if not isinstance(name, str) or name in ("", ".", "..", MANIFEST):
        return False
    return name.isprintable() and "/" not in name and "\\" not in name


def is_count(value: object) -> bool:
    """Return whether `value` is a number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class TensorIndex:
    tensors: dict[str, dict[str, Any]]
    """kind/name -> {"shape": global, "boxes": [{"file", "begin": byte, "offset", "shape"}]}"""
    blocks: dict[str, str]
    """file -> digests of its blocks, see `FileDigest`."""

    def dump_json(self) -> str:
        return json.dumps(asdict(self))


def read_index(folder: Path, manifest: Manifest) -> TensorIndex:
    """
    Raises:
        DamagedError: it is missing or altered.
    """
    return TensorIndex(**json.loads(read_checked_text(folder, INDEX, manifest)))


def read_checked_text(folder: Path, name: str, manifest: Manifest) -> str:
    """A small file that has the manifest's digest.

    Raises:
        DamagedError: it has not, or is missing.
    """
    if name not in manifest.files:
        raise DamagedError(f"{MANIFEST} does not name {name}", name)
    text = read_text(folder, name)
    if digest_of_text(text) != manifest.files[name]["xxh128"]:
        raise DamagedError(f"{name} is not what was written", name)
    return text


def read_text(folder: Path, name: str) -> str:
    """
    Raises:
        DamagedError: it is missing or no text. CheckpointError: it cannot be read.
    """
    try:
        return (folder / name).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise DamagedError(f"{name} is missing", name) from missing
    except UnicodeDecodeError as damage:
        raise DamagedError(f"{name} is not what was written: {damage}", name) from damage
    except OSError as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {error}; mend the file system or the permissions"
        ) from error


def verify_file(folder: Path, name: str, size: int, xxh128: str) -> None:
    """Read a file, from the disk and not from this machine's memory of it, and compare it with its digest.

    Raises:
        DamagedError: it differs, or is missing. OSError: it cannot be read.
    """
    check_size(folder, name, size)
    _drop_page_cache(folder / name)
    found = digest_of_file(folder / name).xxh128
    if found != xxh128:
        raise DamagedError(
            f"{name} is not what was written: its digest is {found}, not {xxh128}", name
        )


def _drop_page_cache(path: Path) -> None:
    """Have the next read come from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def check_size(folder: Path, name: str, size: int) -> None:
    """
    Raises:
        DamagedError: the file is missing or of another size. OSError: the disk does not answer.
    """
    try:
        found = (folder / name).stat().st_size
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise DamagedError(f"{name} is missing", name) from missing
    if found != size:
        raise DamagedError(f"{name} has {found} bytes instead of {size}", name)


def collect_digests(manifest: Manifest, index: TensorIndex) -> dict[str, FileDigest]:
    """Return the digests of the tensor files.

    Raises:
        DamagedError: the index names a file that the manifest does not have, and that may lie anywhere.
    """
    named = {
        box["file"] for tensor in index.tensors.values() for box in tensor["boxes"]
    } | index.blocks.keys()
    strangers = sorted(named - manifest.files.keys())
    if strangers:
        raise DamagedError(f"{INDEX} names {strangers[0]!a}, which {MANIFEST} does not name", INDEX)
    return {
        name: FileDigest(manifest.files[name]["bytes"], manifest.files[name]["xxh128"], b)
        for name, b in index.blocks.items()
    }
