"""Tests that bad input ends a command with an exit code and a helpful message, and no lost file.

The cases are the rows of `table.md`. Each runs in a fresh copy of one folder, which has every file
that a valid command line needs.
"""

import hashlib
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input.forked_commands import CommandLine, ForkedCommands, Result
from bad_input.table import BadInput, read_table
from tiny_corpus import JSONL, MERGES, REFERENCE_PREFIX, VOCAB

from megatron.data.indexed import get_bin_path, get_idx_path

WORDS, ROWS = read_table()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    started = ForkedCommands(tmp_path_factory.mktemp("streams"))
    yield started
    # pytest shows this with -s.
    print(f"the commands took {started.close():.1f} s of CPU")


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    """Yield a port that another program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def pristine(commands: ForkedCommands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a corpus, a tokenizer, a configuration, and a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("pristine")
    prefix = str(REFERENCE_PREFIX)
    shutil.copy(get_bin_path(prefix), folder / "corpus.bin")
    shutil.copy(get_idx_path(prefix), folder / "corpus.idx")
    shutil.copy(VOCAB, folder / "vocab.json")
    shutil.copy(MERGES, folder / "merges.txt")
    lines = JSONL.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "texts.jsonl").write_text("".join(lines[:5]), encoding="utf-8")
    (folder / "run.yaml").write_text("model:\n  num_layers: 1\n")
    (folder / "ds.json").write_text('{"train_batch_size": 2}\n')
    (folder / "run.sh").write_text(f"python pretrain_gpt.py {WORDS['SIZES']} --data-path corpus\n")
    make = "pretrain $TRAIN --save run --load run --save-interval 2"
    made = run_row(commands, folder, BadInput("", "", make, 0, ""))
    assert made.code == 0, made.errors
    (folder / "log.txt").write_text(made.output)
    assert sorted(path.name for path in (folder / "run").glob("global_step*")) == [
        "global_step2",
        "global_step4",
    ]
    return folder


def run_row(commands: ForkedCommands, folder: Path, row: BadInput, port: int = 0) -> Result:
    """Run the command of a row in a folder."""
    variables, command = row.split_command({**WORDS, "BUSY_PORT": str(port)})
    return commands.run(
        CommandLine(
            command,
            folder,
            absent=variables.pop("WITHOUT", None),
            obey_modes="OBEY_MODES" in variables,
            new_process="NEW_PROCESS" in variables,
            environment=variables,
        )
    )


def list_state(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and content of everything in a folder, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(mode):
            content = os.readlink(path)
        else:
            content = ""
        found[str(path.relative_to(folder))] = (mode, content)
    return found


def test_table_is_complete() -> None:
    names = [row.what for row in ROWS]
    assert len(names) >= 100
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_bad_input(
    row: BadInput, commands: ForkedCommands, pristine: Path, tmp_path: Path, busy_port: int
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(pristine, folder, symlinks=True)
    if row.before:
        subprocess.run(["bash", "-ec", row.before], cwd=folder, check=True)
    before = list_state(folder)
    result = run_row(commands, folder, row, busy_port)
    after = list_state(folder)
    printed = " ".join(result.errors.split())
    shown = f"exit code {result.code}\n{result.output}\n{result.errors}"
    assert "Traceback" not in shown
    # Rows write this into a file that is not for a log.
    assert "a-secret" not in shown
    assert result.code == row.code, shown
    assert row.phrase in printed
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    assert changed == [], shown
