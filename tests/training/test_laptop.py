"""The commands of docs/laptop.md, run as they are printed there.

A new user's session: own text, tokenizer, data, training, Ctrl-C, resume and generated text.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_corpus

from megatron.checkpoint.folder import list_saved_iterations
from megatron.observe.log_line import parse_log_line

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "laptop.md"
LAST = 100
"""The `train_iters` of the page."""
_BLOCK = re.compile(r"^(?:<!-- test: (?P<mark>\w+) -->\n)?```bash\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """Commands of the page. The mark is skip, interrupt or None."""

    mark: str | None
    code: str


def read_blocks() -> list[Block]:
    return [Block(found["mark"], found["code"]) for found in _BLOCK.finditer(PAGE.read_text())]


def make_clone(folder: Path) -> Path:
    """Return a folder with the files that the page's commands name, and a folder of text."""
    folder.mkdir()
    for name in ("tools", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "corpus").mkdir()
    for number, text in enumerate(tiny_corpus.texts()):
        (folder / "corpus" / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def start(block: Block, folder: Path) -> subprocess.Popen[str]:
    """Start the commands of a block in a shell, which ends at the first one that fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    # A shell that starts the tests in the background ignores SIGINT. Children would inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            ["bash", "-euc", block.code],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The processes of a terminal are one group, which gets its Ctrl-C.
            process_group=0,
        )
    finally:
        signal.signal(signal.SIGINT, inherited)


def finish(process: subprocess.Popen[str]) -> str:
    """Return what the process still prints, after its end."""
    try:
        printed, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return printed


def press_ctrl_c(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Wait for the second line of training, and press Ctrl-C.

    Returns what was printed, and the last iteration before Ctrl-C.
    """
    assert process.stdout is not None
    printed = ""
    reports = list[dict[str, int | float]]()
    while len(reports) < 2:
        line = process.stdout.readline()
        assert line, printed
        printed += line
        report = parse_log_line(line)
        if report is not None:
            reports.append(report)
    os.killpg(process.pid, signal.SIGINT)
    return printed + finish(process), int(reports[-1]["iteration"])


@pytest.mark.when_changed(
    "docs/laptop.md",
    "README.md",
    "examples/*",
    "pretrain_gpt.py",
    "tools/*",
    "megatron/commands/*",
    "megatron/console/*",
    "megatron/extras/preparation/commands/*",
    "megatron/extras/inference/commands/*",
    "tests/training/test_laptop.py",
)
def test_a_new_users_session_on_a_laptop(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    blocks = read_blocks()
    assert [block.mark for block in blocks].count("interrupt") == 1
    checkpoints = clone / "first" / "run"
    outputs = list[str]()
    stopped = 0
    for block in blocks:
        if block.mark == "skip":
            continue
        process = start(block, clone)
        if block.mark == "interrupt":
            printed, seen = press_ctrl_c(process)
            assert process.returncode == 0, printed
            (stopped,) = list_saved_iterations(checkpoints)
            assert seen <= stopped < LAST
            assert "Traceback" not in printed
        else:
            printed = finish(process)
            assert process.returncode == 0, printed
        outputs.append(printed)
    tokenizer, data, plan, _, resumed, generated = outputs
    assert "2048 ids" in tokenizer
    assert "100 documents" in data
    assert "no problems found" in data
    assert "1 process = 1 tensor" in plan
    assert f"at iteration {stopped}" in resumed
    reports = [report for line in resumed.splitlines() if (report := parse_log_line(line))]
    assert reports[0]["iteration"] > stopped
    assert reports[-1]["iteration"] == LAST
    assert f"training is complete at iteration {LAST}" in resumed
    # The entropy of 2,048 equal ids is 7.6 nats.
    assert reports[-1]["lm_loss"] < 6.5
    assert LAST in list_saved_iterations(checkpoints)
    assert re.search(rf"^iteration +{LAST}$", generated, re.M)
    assert len(generated.partition("\nThe ")[2]) > 40
