"""Saving: every rank writes the boxes that it owns into a fresh folder; the folder gets its name, then the pointers move.

The invariant: a kill at any instant leaves the pointers at a whole checkpoint, the old or the new one.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron import __version__
from megatron.checkpoint.folder import REPLACED, UNFINISHED, point_to, step_folder
from megatron.checkpoint.tensor_file import write_tensors
from megatron.durable import replace_file, sync_folder
from megatron.errors import CheckpointError
from megatron.parallel.chunk import Chunk

FORMAT = 1


def save_checkpoint(
    root: Path,
    iteration: int,
    chunks: Sequence[Chunk],
    *,
    scalars: dict[str, Any] | None,
    state: dict[str, Any],
    config_yaml: str,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint, all ranks together. Returns its folder.

    `scalars`: the optimizer's; None leaves the optimizer's state out of the checkpoint. `group`: for small messages, on the CPU.

    Raises:
        CheckpointError: on every rank, naming the ranks that could not write and why. Older checkpoints are untouched.
    """
    final = step_folder(root, iteration)
    fresh = final.with_name(final.name + UNFINISHED)
    _together(lambda: _make_fresh(fresh) if rank == 0 else None, rank, world_size, group)
    name = f"rank_{rank:05d}.safetensors"
    own = {_key(chunk): chunk for chunk in chunks if chunk.owner}

    def write() -> dict[str, Any] | None:
        if not own:
            return None
        size = write_tensors(fresh / name, {key: chunk.tensor for key, chunk in own.items()})
        return {"file": name, "bytes": size, "boxes": [_describe(key, chunk, name) for key, chunk in own.items()]}

    parts = [part for part in _together(write, rank, world_size, group) if part is not None]
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "iteration": iteration,
        "world_size": world_size,
        "state": state,
        "optimizer": scalars,
        "files": {part["file"]: {"bytes": part["bytes"]} for part in parts},
    }
    _together(lambda: _finish(fresh, final, manifest, parts, config_yaml) if rank == 0 else None, rank, world_size, group)
    return final


def check_writable(root: Path) -> None:
    """Write and remove a file in the folder that checkpoints will go to, before anything is trained.

    Raises:
        CheckpointError: it cannot be made or written.
    """
    probe = root / ".writable"
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(probe, "")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written: {error}; give another folder, or make room") from error


def _key(chunk: Chunk) -> str:
    return f"{chunk.kind}/{chunk.name}@{','.join(map(str, chunk.offset))}"


def _describe(key: str, chunk: Chunk, file: str) -> dict[str, Any]:
    return {
        "tensor": f"{chunk.kind}/{chunk.name}",
        "global_shape": chunk.global_shape,
        "file": file,
        "key": key,
        "offset": chunk.offset,
        "shape": tuple(chunk.tensor.shape),
    }


def _make_fresh(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # of a save that was cut off: no pointer ever named it
    folder.mkdir(parents=True)


def _finish(fresh: Path, final: Path, manifest: dict[str, Any], parts: list[dict[str, Any]], config_yaml: str) -> None:
    index: dict[str, Any] = {}
    for part in parts:
        for box in part["boxes"]:
            entry = index.setdefault(box.pop("tensor"), {"shape": box["global_shape"], "boxes": []})
            del box["global_shape"]
            entry["boxes"].append(box)
    replace_file(fresh / "index.json", json.dumps(index))
    replace_file(fresh / "config.yaml", config_yaml)
    replace_file(fresh / "manifest.json", json.dumps(manifest, indent=1))
    replaced = final.with_name(final.name + REPLACED)
    if replaced.exists():
        shutil.rmtree(replaced)
    if final.exists():
        os.rename(final, replaced)
    os.rename(fresh, final)
    sync_folder(final.parent)
    point_to(final.parent, manifest["iteration"])
    if replaced.exists():
        shutil.rmtree(replaced)


def _together(act: Callable[[], Any], rank: int, world_size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Run `act` on every rank and learn all results; a failure of one is an error on all."""
    result, failure = None, None
    try:
        result = act()
    except OSError as error:
        failure = f"rank {rank} on {os.uname().nodename}: {error}"
    outcomes: list[Any] = [(result, failure)]
    if world_size > 1:
        outcomes = [None] * world_size
        dist.all_gather_object(outcomes, (result, failure), group=group)
    failures = [failed for _, failed in outcomes if failed]
    if failures:
        raise CheckpointError("the checkpoint could not be written; older ones are untouched\n  " + "\n  ".join(failures))
    return [value for value, _ in outcomes]
