"""Files that hang when the run ends.

A pipe without a writer stands for a file on a file system that does not answer. Opening it blocks.
The run itself refuses pipes, so `open_without_a_check` takes the place of its reader.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults.launches import ERROR, NewJob

from megatron.checkpoint import lease
from megatron.checkpoint.lease import FILE

ROOT = Path(__file__).resolve().parents[2]
SOON = {
    "megatron.checkpoint.lease.BEAT_SECONDS": 0.1,
    "megatron.run.leaving.CLOSING_SECONDS": 2.0,
}
ABANDONED = "could not be closed in 2 s"


def replace_by_pipe(path: Path) -> None:
    """Replace a file by one that hangs when it is opened."""
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(path)
    # By now the heartbeat waits in `open`.
    time.sleep(0.5)


def open_without_a_check(rank: int) -> None:
    """Let the lease open its file in a way that waits for a pipe."""
    module: Any = lease
    module.open_regular = lambda path, **_: Path(path).open("rb")  # noqa: SIM115
    module.load_json = lambda path, _: json.loads(Path(path).read_text())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_error_is_printed_although_the_folder_hangs(
    ranks: int, new_job: NewJob, corpus: str, tmp_path: Path
) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"own{suffix}")
    job = new_job(
        "job",
        f"--train-iters 300000 --data-path {tmp_path / 'own'}",
        ranks,
        metrics=tmp_path / "metrics.jsonl",
    )
    launch = job.launch(constants=SOON, prepare=open_without_a_check)
    launch.wait_for_line("iteration        3/")
    replace_by_pipe(job.folder / FILE)
    # All ids of the data become 65535, which is outside of the vocabulary.
    with open(tmp_path / "own.bin", "r+b") as file:
        file.write(b"\xff" * os.fstat(file.fileno()).st_size)
    codes = launch.codes()
    output = launch.output()
    assert codes[0] == ERROR, launch.all_output()
    assert "65535" in output
    assert output.index("DataError") < output.index(ABANDONED)


def test_process_ends_although_a_read_of_data_hangs(tmp_path: Path) -> None:
    """The thread that reads ahead hangs, and Python would wait for it at the exit."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
from contextlib import ExitStack
from megatron.data.position_source import Prefetcher
from megatron.run import leaving, pretrain
leaving.CLOSING_SECONDS = 1.0
def read(name):
    return open(name).read()
prefetcher = Prefetcher(read, 1)
prefetcher.take("/dev/null", ["{pipe}"])
stack = ExitStack()
stack.callback(prefetcher.close)
print("ready", flush=True)
pretrain.leave(stack)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == 0, output
    assert b"could not be closed in 1 s" in output
