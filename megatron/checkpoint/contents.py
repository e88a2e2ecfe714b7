"""The contents of a checkpoint except its tensors, and the small files that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.durable import sync_folder, write_file
from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.lineage import Lineage
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest, TensorIndex
from megatron.checkpoint.shard_file import WrittenFile


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint, except its tensors."""

    iteration: int
    scalars: dict[str, Any] | None
    """The optimizer's step count and loss scale. None if its state is not saved."""
    state: dict[str, Any]
    """`TrainState` as JSON."""
    config_yaml: str
    """The resolved configuration."""
    version: str = ""
    """Version of the code that writes the checkpoint."""
    layout: str = ""
    """Parallel layout of the run, for people. Loading ignores it."""


def write_small_files(
    folder: Path,
    contents: CheckpointContents,
    files: Sequence[WrittenFile],
    lineage: Lineage,
    *,
    keep: bool,
) -> Manifest:
    """Write index, configuration and manifest, and return the manifest.

    The manifest is written last, because it holds the digests of the other files. A folder without
    a manifest is not a checkpoint.

    Args:
        folder: The folder of the tensor files.
        contents: The contents of the checkpoint, except its tensors.
        files: The tensor files of all ranks.
        lineage: The checkpoints that the run came through before this one.
        keep: Whether --keep-latest-checkpoints must never remove this checkpoint.
    """
    digests: dict[str, dict[str, Any]] = {
        written.file: {"bytes": written.digest.bytes, "xxh128": written.digest.xxh128}
        for written in files
    }
    index = make_index(files)
    for name, text in ((INDEX, index.dump_json()), (CONFIG, contents.config_yaml)):
        write_file(folder / name, text)
        digests[name] = {"bytes": len(text.encode()), "xxh128": digest_of_text(text)}
    entries = [[entry.iteration, entry.digest, entry.keep, entry.applied] for entry in lineage]
    manifest = Manifest(
        contents.iteration,
        contents.version,
        contents.layout,
        contents.state,
        contents.scalars,
        digests,
        entries,
        keep,
        format=index.format,
    )
    write_file(folder / MANIFEST, manifest.dump_json())
    sync_folder(folder)
    return manifest


def make_index(files: Sequence[WrittenFile]) -> TensorIndex:
    """Return the index of the tensor files of all ranks."""
    index = TensorIndex({}, {written.file: written.digest.blocks for written in files})
    for written in files:
        for stored in written.slices:
            entry = index.tensors.setdefault(
                stored.tensor, {"shape": stored.global_shape, "boxes": []}
            )
            # Without the key it is F32, as in all formats before 4.
            if stored.dtype != "F32":
                entry["dtype"] = stored.dtype
            entry["boxes"].append(
                {
                    "file": written.file,
                    "begin": stored.begin,
                    "offset": stored.offset,
                    "shape": stored.shape,
                }
            )
    return index
