"""A rehearsal in real processes is killed at random moments, and leaves nothing."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from operations.rehearsing import SIZES, Handover
from operations.run_folder import digest_folder, wait_until
from process_pool import ProcessPool

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
MARK = "HANDOVER_OF_THIS_TEST"
"""An environment variable, by which the processes of a rehearsal are found."""
TRIALS = [
    ("tool", signal.SIGKILL),
    ("torchrun", signal.SIGKILL),
    ("rank", signal.SIGKILL),
    ("tool", signal.SIGTERM),
] * 3


class Trial:
    """A rehearsal with two ranks."""

    def __init__(self, run: Handover, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True)
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        words = [sys.executable, ROOT / "tools" / "handover.py", run.folder, "--from", 4]
        words += ["--steps", 5, "--scratch", self.scratch, "--", sys.executable, "-m"]
        words += ["torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        name, _, value = self.mark.partition("=")
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.tool = subprocess.Popen(
                [*map(str, words), str(ROOT / "pretrain_gpt.py"), *run.flags],
                env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
                stdout=output,
                stderr=output,
            )

    def find(self, target: str = "") -> list[int]:
        """Return the processes of the rehearsal that are a tool, a torchrun or a rank, or all."""
        found = []
        for process, command, environment in list_processes():
            if self.mark not in environment:
                continue
            kind = "other"
            if "RANK" in {word.partition("=")[0] for word in environment}:
                kind = "rank"
            elif "torch.distributed.run" in command:
                kind = "torchrun"
            if process == self.tool.pid:
                kind = "tool"
            if target in ("", kind):
                found.append(process)
        return found


def list_processes() -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield number, command and environment of each process that can be read."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (place / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
        except OSError:
            continue
        yield int(place.name), command, environment


@pytest.fixture(scope="module")
def recorded(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Handover, float]:
    """Return a run, and the seconds of a rehearsal that is not killed."""
    folder = tmp_path_factory.mktemp("kills")
    run = Handover(pool, corpus, folder / "run", f"{SIZES} --exit-interval 9")
    run.train(ranks=2)
    begin = time.monotonic()
    trial = Trial(run, folder / "trial")
    assert trial.tool.wait(300) == 0, trial.output.read_text()
    seconds = time.monotonic() - begin
    assert trial.find() == []
    assert list(trial.scratch.iterdir()) == []
    return run, seconds


@pytest.mark.parametrize("number", range(len(TRIALS)))
def test_a_kill_at_a_random_moment_leaves_nothing(
    recorded: tuple[Handover, float], tmp_path: Path, number: int
) -> None:
    run, seconds = recorded
    target, sent = TRIALS[number]
    # One moment in each twelfth of the time.
    moment = seconds * (number + random.Random(number).random()) / len(TRIALS)
    before = digest_folder(run.folder.parent)
    trial = Trial(run, tmp_path)
    time.sleep(moment)
    # What was started last may not exist yet, and all may have ended.
    last = "tool" if target == "tool" else "rank"
    wait_until(lambda: trial.find(last) or trial.tool.poll() is not None)
    killed = trial.find(target)[-1:]
    left = len(trial.find())
    begin = time.monotonic()
    for process in killed:
        os.kill(process, sent)
    code = trial.tool.wait(120)
    wait_until(lambda: not trial.find())
    wait_until(lambda: not list(trial.scratch.iterdir()))
    print(f"{target} {sent.name} at {moment:.1f} of {seconds:.1f} s, {left} processes, code {code}")
    print(f"nothing left {time.monotonic() - begin:.1f} s later")
    assert digest_folder(run.folder.parent) == before
    output = trial.output.read_text()
    if target == "tool" and killed:
        assert code == -sent
    elif code != 0:
        assert code == 1, output
        assert "no go: the command ended with exit code" in output
