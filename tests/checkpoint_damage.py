"""Ways to harm a checkpoint's files."""

import json
from pathlib import Path

from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.manifest import Manifest


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
    (folder / "manifest.json").write_text(Manifest(**{**record, **altered}).to_text())
