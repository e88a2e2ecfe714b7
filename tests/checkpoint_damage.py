"""Functions that damage a checkpoint's files or write them as earlier versions did."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from saved_checkpoint import save_checkpoint

from megatron.checkpoint.digest import digest_of_file, digest_of_text
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save import CheckpointContents
from megatron.parallel.shard import TensorShard


def flip(file: Path, position: int = -1) -> None:
    """Flip one bit of a file. A negative position counts from the end."""
    if position < 0:
        position += file.stat().st_size
    with open(file, "r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


def resign(folder: Path, index: dict, **altered: object) -> None:
    """Write another index and a manifest that fits it, as a mistake of the writer would.

    Args:
        folder: Folder of the checkpoint.
        index: The contents of `index.json`.
        altered: Fields of the manifest that are replaced.
    """
    text = json.dumps(index)
    (folder / "index.json").write_text(text)
    record = json.loads((folder / "manifest.json").read_text())
    del record["digest"]
    record["files"]["index.json"] = {"bytes": len(text.encode()), "xxh128": digest_of_text(text)}
    (folder / "manifest.json").write_text(Manifest(**{**record, **altered}).dump_json())


def save_unchecked(root: Path, contents: CheckpointContents, shards: Sequence[TensorShard]) -> Path:
    """Save a checkpoint even if numbers are not finite, as versions before format 3 did."""
    with mock.patch("megatron.checkpoint.save.gather_not_finite", return_value=[]):
        return save_checkpoint(root, contents, shards)


def make_format_2(folder: Path) -> None:
    """Rewrite the manifest as a version before format 3 would have written it."""
    record = json.loads((folder / "manifest.json").read_text())
    del record["digest"]
    record["format"] = 2
    record["state"].pop("applied_steps", None)
    record["course"] = [entry[:3] for entry in record["course"]]
    (folder / "manifest.json").write_text(Manifest(**record).dump_json())


def poison(folder: Path, tensor: str, value: float, count: int = 1) -> None:
    """Overwrite the first numbers of a tensor. All digests fit, as if they were saved so.

    Args:
        folder: Folder of the checkpoint.
        tensor: The tensor as kind/name.
        value: The number to write.
        count: How many numbers are overwritten.
    """
    index = json.loads((folder / "index.json").read_text())
    stored = index["tensors"][tensor]["boxes"][0]
    name = stored["file"]
    with open(folder / name, "r+b") as opened:
        opened.seek(stored["begin"])
        opened.write(struct.pack("<f", value) * count)
    digest = digest_of_file(folder / name)
    index["blocks"][name] = digest.blocks
    record = json.loads((folder / "manifest.json").read_text())
    record["files"][name] = {"bytes": digest.bytes, "xxh128": digest.xxh128}
    (folder / "manifest.json").write_text(json.dumps(record))
    resign(folder, index)
