"""Ways to harm a checkpoint's files."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.digest import digest_of_file, digest_of_text
from megatron.checkpoint.folder import step_folder
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.parallel.shard import TensorShard


def flip(file: Path, position: int = -1) -> None:
    """One bit; a negative position counts from the end."""
    with open(file, "r+b") as opened:
        opened.seek(position, 2 if position < 0 else 0)
        byte = opened.read(1)[0]
        opened.seek(position, 2 if position < 0 else 0)
        opened.write(bytes([byte ^ 1]))


def resign(folder: Path, index: dict, **altered: object) -> None:
    """Write another index, and the manifest that fits it: what a fault of ours would leave."""
    text = json.dumps(index)
    (folder / "index.json").write_text(text)
    record = json.loads((folder / "manifest.json").read_text())
    del record["digest"]
    record["files"]["index.json"] = {"bytes": len(text.encode()), "xxh128": digest_of_text(text)}
    (folder / "manifest.json").write_text(Manifest(**{**record, **altered}).dump_json())


class SaverOfFormat2(Saver):
    """Stores what is not finite, too, as versions before format 3 did."""

    def _refuse_not_finite(
        self, contents: CheckpointContents, chunks: Sequence[TensorShard]
    ) -> None:
        pass


def save_unchecked(root: Path, contents: CheckpointContents, chunks: Sequence[TensorShard]) -> Path:
    """`save_checkpoint` of a version before format 3, with numbers that are not finite."""
    root.mkdir(parents=True, exist_ok=True)
    saver = SaverOfFormat2(root)
    saver.begin(contents, chunks)
    saver.complete()
    return step_folder(root, contents.iteration)


def make_format_2(folder: Path) -> None:
    """Rewrite the manifest as a version before format 3 would have written it."""
    record = json.loads((folder / "manifest.json").read_text())
    del record["digest"]
    record["format"] = 2
    record["state"].pop("applied_steps", None)
    record["course"] = [entry[:3] for entry in record["course"]]
    (folder / "manifest.json").write_text(Manifest(**record).dump_json())


def poison(folder: Path, tensor: str, value: float, count: int = 1) -> None:
    """Overwrite the first `count` numbers of kind/name; digests fit, as if they had been saved
    so."""
    index = json.loads((folder / "index.json").read_text())
    box = index["tensors"][tensor]["boxes"][0]
    with open(folder / box["file"], "r+b") as opened:
        opened.seek(box["begin"])
        opened.write(struct.pack("<f", value) * count)
    digest = digest_of_file(folder / box["file"])
    index["blocks"][box["file"]] = digest.blocks
    record = json.loads((folder / "manifest.json").read_text())
    record["files"][box["file"]] = {"bytes": digest.bytes, "xxh128": digest.xxh128}
    (folder / "manifest.json").write_text(json.dumps(record))
    resign(folder, index)
