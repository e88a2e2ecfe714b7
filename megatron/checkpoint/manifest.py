"""The files `manifest.json` and `index.json` of a checkpoint, see docs/checkpoint_format.md.

The manifest describes the checkpoint and has the digest of every file, itself included. It is
written last. The index has the position of each stored slice of each tensor, and the digests of the
files' blocks. It is a file of its own because it is large, and only readers of tensors need it.

On the disk, a stored slice is called "box", and the lineage is called "course".

Invariant: no name or number of a file is used before it was checked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.outside_file import INDEX_BYTES, SETTINGS_BYTES, load_bytes, parse_json
from megatron.checkpoint.digest import BLOCK, FileDigest, digest_of_file, digest_of_text

FORMAT = 4
"""The newest format. It has tensors in bf16, each with its dtype in the index."""
FP32_FORMAT = 3
"""The format of a checkpoint whose tensors are all fp32.

Since format 3, the state and the entries of `course` have the number of applied steps.
"""
_READABLE = (2, FP32_FORMAT, FORMAT)
"""The formats that can be read, from the oldest to the newest."""
APPLIED_STEPS = "applied_steps"
"""Key of `Manifest.state` that retention reads."""
MANIFEST = "manifest.json"
INDEX = "index.json"
CONFIG = "config.yaml"


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`."""

    iteration: int
    version: str
    """Version of the code that wrote the checkpoint."""
    layout: str
    """Parallel layout of the run that wrote it, for people. Loading ignores it."""
    state: dict[str, Any]
    """`TrainState` as JSON, with the fingerprints of the data."""
    optimizer: dict[str, Any] | None
    """The optimizer's step count and loss scale. None if its state was not saved."""
    files: dict[str, dict[str, Any]]
    """Name -> {"bytes", "xxh128"} of every other file."""
    course: list[list[Any]]
    """[iteration, digest, keep, applied steps] of each earlier checkpoint of the lineage.

    See `lineage.py`.
    """
    keep: bool
    """Retention never removes it, see `lineage.LineageEntry`."""
    format: int = FP32_FORMAT
    block_bytes: int = BLOCK

    def dump_json(self) -> str:
        """Return the text of the file, which includes the manifest's own digest."""
        return json.dumps({**asdict(self), "digest": self.digest}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """Digest of the manifest without this field. It identifies the checkpoint."""
        return _digest_of(asdict(self))

    @property
    def bytes(self) -> int:
        """Total size of all other files."""
        return sum(facts["bytes"] for facts in self.files.values())


def make_damage(name: str, why: object) -> DamagedError:
    """Return the error for a file of a checkpoint that was altered."""
    return DamagedError(f"{name} is not what was written: {why}", name)


def _digest_of(record: Mapping[str, Any]) -> str:
    # Sorted keys, so that the digest does not depend on the order of the fields in the class.
    return digest_of_text(json.dumps(record, sort_keys=True))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        DamagedError: If it is missing or altered.
        CheckpointError: If it has another format or cannot be read.
    """
    return manifest_of_text(read_text(folder, MANIFEST), folder)


def manifest_of_text(text: str, folder: Path) -> Manifest:
    """Return the manifest whose text `Manifest.dump_json` made.

    Args:
        text: The text of the file.
        folder: Folder of the checkpoint, for messages.

    Raises:
        DamagedError: If the text was altered.
        CheckpointError: If it has another format.
    """
    try:
        record = parse_json(text)
        found = record.get("format")
        digest = record.pop("digest", None)
        agrees = digest == _digest_of(record)
    except (ValueError, AttributeError) as damage:
        raise make_damage(MANIFEST, damage) from damage
    # The number is only believed if the digest agrees, or if there is none, because every readable
    # format has one. Otherwise a flipped bit may have changed it, which is damage.
    if isinstance(found, int) and found not in _READABLE and (agrees or digest is None):
        way_out = "load it with the version that wrote it"
        if found > FORMAT:
            way_out = "update this installation"
        raise CheckpointError(
            f"{folder} has format {found}; this version reads formats {_READABLE[0]} to {FORMAT}: "
            f"{way_out}"
        )
    if not agrees:
        own = _digest_of(record)
        raise make_damage(MANIFEST, f"its own digest field is {digest}, and its digest is {own}")
    _check_names(record)
    return Manifest(**record)


def _check_names(record: Mapping[str, Any]) -> None:
    """Check the values of a manifest that become names of files and folders.

    The digest is no protection against an attacker, who can write a matching one. Without this
    check, a name such as `../x` would be read outside the folder.

    Raises:
        DamagedError: If a file's name is not plain, or an iteration is not a number.
    """
    # `Manifest(**record)` checks no types, so later code relies on these checks.
    files = record.get("files")
    course = record.get("course")
    if not isinstance(files, dict) or not isinstance(course, list):
        raise make_damage(MANIFEST, "it has no 'files' or no 'course'")
    for name, facts in files.items():
        if not is_plain_name(name):
            raise DamagedError(
                f"{MANIFEST} names the file {name!a}; a checkpoint has plain file names only, "
                "without separators or control characters. This program did not write it, and "
                "reads nothing of it",
                MANIFEST,
            )
        if (
            not isinstance(facts, dict)
            or not is_count(facts.get("bytes"))
            or not isinstance(facts.get("xxh128"), str)
        ):
            raise make_damage(MANIFEST, f"{name} has no size or digest")
    iterations = [record.get("iteration")]
    for entry in course:
        # Format 2 has three values in an entry, format 3 also the number of applied steps.
        well_formed = isinstance(entry, list) and len(entry) in (3, 4)
        iterations.append(entry[0] if well_formed else None)
    # An iteration becomes a part of a folder's name.
    for iteration in iterations:
        if not is_count(iteration):
            raise make_damage(MANIFEST, f"{iteration!a} is not an iteration")


def is_plain_name(name: object) -> bool:
    """Return whether `name` can only be a file in the folder itself, and prints as one line."""
    if not isinstance(name, str) or name in ("", ".", "..", MANIFEST):
        return False
    return name.isprintable() and "/" not in name and "\\" not in name


def is_count(value: object) -> bool:
    """Return whether `value` is a non-negative integer."""
    # In Python, True is an int. In JSON it is not.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class TensorIndex:
    """The contents of `index.json`."""

    tensors: dict[str, dict[str, Any]]
    """kind/name -> {"shape": global, "boxes": [{"file", "begin": byte, "offset", "shape"}]}.

    In format 4 there may be a "dtype", a key of `tensor_file.DTYPES`.
    """
    blocks: dict[str, str]
    """File -> digests of its blocks, see `FileDigest`."""

    def dump_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self))

    @property
    def format(self) -> int:
        """The format of a checkpoint with these tensors."""
        # An older version would read values of bf16 as fp32. It refuses the higher number.
        if any("dtype" in tensor for tensor in self.tensors.values()):
            return FORMAT
        return FP32_FORMAT


def read_index(folder: Path, manifest: Manifest) -> TensorIndex:
    """Read the index of a checkpoint and check it against the manifest's digest.

    Raises:
        DamagedError: If it is missing or altered.
        CheckpointError: If it cannot be read.
    """
    return TensorIndex(**parse_json(read_checked_text(folder, INDEX, manifest)))


def read_checked_text(folder: Path, name: str, manifest: Manifest) -> str:
    """Return the text of a small file whose digest the manifest has.

    Raises:
        DamagedError: If it is missing or its digest differs.
        CheckpointError: If it cannot be read.
    """
    if name not in manifest.files:
        raise DamagedError(f"{MANIFEST} does not name {name}", name)
    text = read_text(folder, name)
    if digest_of_text(text) != manifest.files[name]["xxh128"]:
        raise DamagedError(f"{name} is not what was written", name)
    return text


def read_text(folder: Path, name: str) -> str:
    """Return the text of a small file of a checkpoint, without checking its digest.

    Raises:
        DamagedError: If it is missing or not UTF-8.
        CheckpointError: If it cannot be read.
    """
    # Bytes, because text mode would translate line ends, and the digest is of the bytes.
    try:
        limit = SETTINGS_BYTES if name == CONFIG else INDEX_BYTES
        return load_bytes(folder / name, limit).decode()
    # A missing file is damage, so an older checkpoint is taken. Any other I/O error may be
    # temporary, and must not cost a good checkpoint.
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise DamagedError(f"{name} is missing", name) from missing
    except UnicodeDecodeError as damage:
        raise make_damage(name, damage) from damage
    except OSError as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {error}; fix the file system or the permissions"
        ) from error


def verify_file(folder: Path, name: str, size: int, xxh128: str) -> None:
    """Read a file from the disk, not from the page cache, and compare it with its digest.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file.
        size: Its size in bytes.
        xxh128: Its digest.

    Raises:
        DamagedError: If it differs or is missing.
        OSError: If it cannot be read.
    """
    # The size first, because it costs nothing and gives a clearer message.
    check_size(folder, name, size)
    found = digest_of_file(folder / name, from_disk=True).xxh128
    if found != xxh128:
        raise make_damage(name, f"its digest is {found}, not {xxh128}")


def check_size(folder: Path, name: str, size: int) -> None:
    """Check that a file exists and has `size` bytes.

    Raises:
        DamagedError: If it is missing or has another size.
        OSError: If the disk does not answer.
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
        DamagedError: If the index names a file that the manifest does not have.
    """
    # Only names in the manifest have been checked. Any other could lead out of the folder.
    named = {
        stored["file"] for tensor in index.tensors.values() for stored in tensor["boxes"]
    } | index.blocks.keys()
    unknown = sorted(named - manifest.files.keys())
    if unknown:
        raise DamagedError(f"{INDEX} names {unknown[0]!a}, which {MANIFEST} does not name", INDEX)
    return {
        name: FileDigest(manifest.files[name]["bytes"], manifest.files[name]["xxh128"], b)
        for name, b in index.blocks.items()
    }
