"""The exit codes are in one module, and docs/commands.md has them as a table."""

import os
import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from saved_checkpoint import save_checkpoint

from megatron.base import exit_codes
from megatron.base.errors import DataError
from megatron.checkpoint.save import CheckpointContents
from megatron.commands import plan
from megatron.extras.interop.commands import inspect_checkpoint
from megatron.parallel.shard import TensorShard
from megatron.run import leaving

ROOT = Path(__file__).parents[1]
CODES = {name: value for name, value in vars(exit_codes).items() if name.isupper()}


def test_page_has_each_code() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert {name: int(code) for code, name in rows} == CODES
    assert len(set(CODES.values())) == len(CODES)


def test_no_command_has_a_code_of_its_own() -> None:
    own = re.compile(r"(?:\breturn|_exit\(|sys\.exit\(|SystemExit\() ?[1-9]\d*\b(?! [-+*/])")
    files = [
        *(ROOT / "megatron").glob("**/commands/*.py"),
        *(ROOT / "megatron" / "console").glob("*.py"),
        ROOT / "megatron" / "run" / "leaving.py",
    ]
    found = {str(file): own.findall(file.read_text()) for file in files}
    assert len(found) > 30
    assert {name: codes for name, codes in found.items() if codes} == {}


def test_an_error_of_another_rank_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(leaving, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(leaving.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        leaving.leave_with_error(DataError("no such file"))
    assert ended.value.code == exit_codes.USER_ERROR
    # Rank 0 prints first.
    assert waited == [3]
    assert capsys.readouterr().err == f"rank 3 on {platform.node()}: DataError: no such file\n"


def close_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard output a pipe whose reader has ended, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))


def test_presets_and_an_inspection_end_with_their_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = (
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\n"
        "batch: {micro_batch_size: 1}\n"
    )
    shard = TensorShard("weight", "norm", (4,), (0,), torch.ones(4), owner=True)
    save_checkpoint(tmp_path, CheckpointContents(1, None, {"iteration": 1}, config), [shard])
    for main, word in ((plan.main, "--list-presets"), (inspect_checkpoint.main, str(tmp_path))):
        close_reader(monkeypatch)
        assert main([word]) == exit_codes.CLOSED_PIPE
