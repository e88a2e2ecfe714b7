"""How far a preprocessing run has come, on disk, so that a killed one can go on.

Invariant: whatever the journal says is in the partial outputs was on the disk before the journal said so; it is replaced as a
whole, hence never half written. A run with other inputs, tokenizer or flags never continues it.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.durable import replace_file
from megatron.errors import ConfigError, DataError
from megatron.preprocess.inputs import Position

VERSION = 1


@dataclass(frozen=True)
class PreprocessProgress:
    """`outputs`: for each key (tokens, documents). `rejected`: encoders that gave wrong ids. `complete`: names are missing."""

    position: Position = field(default_factory=Position)
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)
    lines: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    rejected: tuple[str, ...] = ()
    complete: bool = False

    def restart(self, rejected: str) -> "PreprocessProgress":
        return replace(PreprocessProgress(), rejected=(*self.rejected, rejected))


class Journal:
    """PREFIX.journal. `load` gives the progress of an earlier run, None where there is none."""

    def __init__(self, prefix: str, fingerprint: dict[str, str]) -> None:
        self.path = Path(f"{prefix}.journal")
        self._fingerprint = fingerprint

    def load(self) -> PreprocessProgress | None:
        """Raises ConfigError where the earlier run was another one, DataError where the journal is damaged."""
        if not self.path.exists():
            return None
        try:
            found = json.loads(self.path.read_bytes())
            version, fingerprint, progress = (
                found["version"],
                dict(found["fingerprint"]),
                dict(found["progress"]),
            )
            position = Position(**progress.pop("position"))
            outputs = {
                key: (int(tokens), int(documents))
                for key, (tokens, documents) in progress.pop("outputs").items()
            }
            loaded = PreprocessProgress(
                position=position,
                outputs=outputs,
                **(progress | {"rejected": tuple(progress["rejected"])}),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path}, the journal of an interrupted run, cannot be read ({error}). Delete it to start over."
            ) from error
        if version != VERSION or fingerprint != self._fingerprint:
            changed = [
                name
                for name in self._fingerprint
                if fingerprint.get(name) != self._fingerprint[name]
            ] or ["version"]
            raise ConfigError(
                f"{self.path} belongs to an interrupted run with other {', '.join(changed)}; this one cannot continue it. "
                "Give the same inputs and flags to go on, another --output-prefix, or delete the journal to start over."
            )
        return loaded

    def save(self, progress: PreprocessProgress) -> None:
        content = json.dumps(
            {"version": VERSION, "fingerprint": self._fingerprint, "progress": asdict(progress)},
            indent=1,
        )
        replace_file(self.path, content)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def compute_run_fingerprint(
    paths: Sequence[str], keys: Sequence[str], append_eod: bool, tokenizer: TokenizerConfig
) -> dict[str, str]:
    """What must stay the same for a run to be continued; only names and hashes."""
    inputs = [
        (os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths
    ]
    return {
        "--input": _digest(inputs),
        "--json-keys": " ".join(keys),
        "--append-eod": str(append_eod),
        "tokenizer": _digest(
            [tokenizer.tokenizer_type, *map(_digest_file, _list_tokenizer_files(tokenizer))]
        ),
    }


@contextmanager
def lock_output(prefix: str) -> Iterator[None]:
    """Holds PREFIX.lock. Raises ConfigError while another run writes the same output. The kernel frees it when a run dies."""
    path = Path(f"{prefix}.lock")
    try:
        file = open(path, "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"--output-prefix {prefix} cannot be written: {error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                raise BlockingIOError("its owner has just finished")
        except BlockingIOError as error:
            raise ConfigError(
                f"--output-prefix {prefix}: another run is writing it ({path} is locked); wait for that one."
            ) from error
        yield
        path.unlink(missing_ok=True)


def _list_tokenizer_files(tokenizer: TokenizerConfig) -> list[Path]:
    if tokenizer.tokenizer_type == "GPT2BPETokenizer":
        return [Path(file) for file in (tokenizer.vocab_file, tokenizer.merge_file) if file]
    path = Path(tokenizer.tokenizer_name_or_path or "")
    return sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path]


def _digest_file(path: Path) -> Any:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
