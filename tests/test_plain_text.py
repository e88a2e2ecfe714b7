"""No program prints foreign text that a terminal obeys, or that forges a line."""

import ast
import io
import json
import logging
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megatron.base.code_version import PACKAGE
from megatron.base.plain_text import make_plain, make_plain_lines
from megatron.commands import plan
from megatron.extras.operations.commands import chronicle, hub_sync
from megatron.extras.operations.hub.client import _forward_warnings, warn
from megatron.extras.preparation.commands import inspect_dataset
from megatron.extras.watch.trackers.feed import hide_secrets
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.progress_bar import ProgressBar

HOSTILE = "a\x1b[2J\r\nALERT: forged\u202eb\u2028c\x9bd"
PLAIN = "a\\x1b[2J  ALERT: forged\\u202eb c\\x9bd"


def check_output(text: str) -> None:
    """Check that an output has the text, and nothing that could forge a line."""
    assert "forged" in text
    assert not any(line.startswith("ALERT") for line in text.splitlines())
    assert all(line.isprintable() for line in text.split("\n")), repr(text)


def test_text_becomes_one_printable_line() -> None:
    assert make_plain(HOSTILE) == PLAIN
    assert (
        make_plain("half a pair \udc80, \N{GRINNING FACE}é\t.")
        == "half a pair \\udc80, \N{GRINNING FACE}é ."
    )
    assert make_plain("x" * 50, 10) == "x" * 10 + "..."
    assert make_plain_lines("one\ntwo\r") == "one\ntwo "
    assert make_plain(OSError(5, "x\x07")) == "[Errno 5] x\\x07"


def test_chronicle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of events, of their details and of evaluations are foreign text."""
    time = datetime.now(UTC).isoformat()
    event = {"time": time, "kind": HOSTILE, "iteration": 1, HOSTILE: {HOSTILE: HOSTILE}}
    (tmp_path / CHRONICLE).write_text(json.dumps(event) + "\n")
    rows = [
        {"time": time, "kind": "train", "iteration": 1, "lm_loss": 2.0},
        {"time": time, "kind": "validation", "iteration": 1, "lm_loss": 2.0, "name": HOSTILE},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chronicle.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    check_output(printed)
    assert printed.count(PLAIN) >= 3


def test_hub_sync(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files and answers of the Hub."""
    hub_sync.log(f"would send {HOSTILE}")
    _forward_warnings(warn)
    logging.getLogger("huggingface_hub").warning("%s", HOSTILE)
    printed = capsys.readouterr()
    check_output(printed.out)
    check_output(printed.err)


def test_log_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The exception of a tracker, and any other message of a library."""
    check_output(hide_secrets(f"HTTPError: {HOSTILE}"))
    bar = ProgressBar(total=1, stream=io.StringIO())
    bar.log(f"warning: tracker trackio: {make_plain(HOSTILE)}")
    bar.log("a\x1b[2Jforged\u202e")
    check_output(capsys.readouterr().out)


def test_error_of_a_run() -> None:
    code = (
        "from megatron.base.errors import DataError\n"
        "from megatron.run.leaving import leave_with_error\n"
        "leave_with_error(DataError('a\\x1b[2J\\rforged'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    check_output(done.stderr)


def test_tool_errors_and_names_of_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "forged\x1b[2J"
    folder.mkdir()
    table = pa.table({"text": ["a"] * 20, HOSTILE: range(20)})
    parquet.write_table(table, folder / "a\r.parquet")
    assert inspect_dataset.main([str(folder), "--dataset-format", "parquet"]) == 0
    (folder / "b\r.parquet").write_bytes(b"no Parquet")
    assert inspect_dataset.main([str(folder), "--dataset-format", "parquet"]) == 1
    printed = capsys.readouterr()
    check_output(printed.out)
    assert inspect_dataset.main([f"{folder}/none", "--dataset-format", "parquet"]) == 2
    check_output(capsys.readouterr().err)


def test_no_other_function_prints() -> None:
    """Whatever is printed may be foreign text, so all of it passes through `print_line`."""
    package = PACKAGE
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id == "print":
                found[str(path.relative_to(package))] += 1
    assert found == {
        "base/plain_text.py": 1,
        # The text of a model is the output. It is printed in parts, and with its tabs.
        # One is that of a constant.
        "extras/inference/commands/generate.py": 4,
        # A number and a constant, to processes that it has started.
        "extras/operations/handover/rehearsal.py": 2,
        # Colours. The texts of the conversations were made plain.
        "extras/preparation/commands/inspect_dataset.py": 1,
        # `hide_secrets` makes the text plain. The stream is not stdout or stderr.
        "extras/watch/trackers/feed.py": 1,
    }


def test_plan_of_a_hostile_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "a.sh"
    script.write_text(
        "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 32 --max-position-embeddings 32 --global-batch-size 4 --train-iters 9 "
        "--lr 1e-3 --vocab-size 64 --micro-batch-size 1 --data-path 'forged\x1b[2J\r\u202e'\n"
    )
    plan.main([str(script), "--world-size", "1"])
    printed = capsys.readouterr()
    check_output(printed.out + printed.err)
