"""Rehearsals in real processes: killed at random moments, and beside the job that trains."""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import struct
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


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += [str(ROOT / "pretrain_gpt.py")]


def start(words: list[str], output: Path, mark: str = f"{MARK}=") -> subprocess.Popen[bytes]:
    """Start a program with a variable in its environment."""
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), name: value}
    with output.open("w") as file:
        return subprocess.Popen(words, env=environment, stdout=file, stderr=file)


class Trial:
    """A rehearsal with two ranks."""

    def __init__(self, run: Handover, folder: Path, *options: str) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True)
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        words = [sys.executable, str(ROOT / "tools" / "handover.py"), str(run.folder), *options]
        words += ["--steps", "5", "--scratch", str(self.scratch), "--", *TORCHRUN, *run.flags]
        self.output = folder / "output"
        self.tool = start(words, self.output, self.mark)

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
    trial = Trial(run, folder / "trial", "--from", "4")
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
    trial = Trial(run, tmp_path, "--from", "4")
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


class Watch:
    """What the kernel (inotify) reports about the entries of a folder."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK)
        # Created, written, moved and deleted entries, and changed attributes.
        mask = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200
        assert libc.inotify_add_watch(self.descriptor, os.fsencode(folder), mask) >= 0

    def read(self) -> set[str]:
        """Return the names of what has changed since the last call, with N for each number."""
        names = set()
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self.descriptor, 1 << 16):
                while content:
                    # The event, and then a name whose length is the last of its four numbers.
                    _, mask, _, length = struct.unpack_from("iIII", content)
                    # The kernel has lost no events.
                    assert not mask & 0x4000
                    name = content[16 : 16 + length].rstrip(b"\0").decode()
                    names.add(re.sub(r"[0-9a-f]{8,}|\d+", "N", name))
                    content = content[16 + length :]
        return names


def read_curve(run: Handover) -> dict[int, tuple[float, ...]]:
    """Return loss, norm and digest of the tokens of each iteration."""
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    keys = ("lm_loss", "grad_norm", "learning_rate", "batch_digest")
    return {
        line["iteration"]: tuple(line[key] for key in keys)
        for line in lines
        if line["kind"] == "train"
    }


def test_a_rehearsal_beside_the_job(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """The job saves meanwhile. Its folder has what the same job alone writes."""
    sizes = f"{SIZES} --train-iters 1000000 --lr-decay-iters 1000 --save-interval 20"
    sizes += " --exit-interval 1000000 --keep-latest-checkpoints 40 --keep-for-handover 5"
    run, alone = (Handover(pool, corpus, tmp_path / name, sizes) for name in ("live", "alone"))
    stop = tmp_path / "stop"
    run.folder.mkdir()
    watch = Watch(run.folder)
    words = [*TORCHRUN, *run.flags, "--kill-switch-path", str(stop)]
    job = start(words, tmp_path / "job")
    pointer = run.folder / "latest"
    wait_until(lambda: pointer.exists() and pointer.read_text() > "global_step20")
    watch.read()
    caches = digest_folder(Path(f"{run.folder}-cache"))
    begin = pointer.read_text()
    trial = Trial(run, tmp_path / "trial", "--json")
    assert trial.tool.wait(300) == 0, trial.output.read_text()
    during = watch.read()
    # The job was not at its end, and has saved meanwhile.
    assert job.poll() is None
    assert pointer.read_text() != begin
    assert digest_folder(Path(f"{run.folder}-cache")) == caches
    output = trial.output.read_text()
    answer = json.loads(output[output.index("{\n") :])
    assert (answer["verdict"], answer["changes"]) == ("go", {})
    assert len({each["iteration"] for each in answer["quantities"]}) == 5
    assert {each["bound"] for each in answer["quantities"]} == {0.0}
    stop.touch()
    assert job.wait(300) == 0, (tmp_path / "job").read_text()
    curve = read_curve(run)
    print(f"from {answer['from']}, job went from {begin} to {max(curve)}, changed: {during}")
    alone.folder.mkdir()
    watch = Watch(alone.folder)
    words = [*TORCHRUN, *alone.flags, "--exit-interval", str(max(curve))]
    assert start(words, tmp_path / "job").wait(300) == 0, (tmp_path / "job").read_text()
    assert read_curve(alone) == curve
    assert {"metrics.jsonl", "latest"} <= during <= watch.read()
    assert list_names(alone.folder) == list_names(run.folder)


def list_names(folder: Path) -> set[str]:
    """Return the names of all files below a folder, with N for each long number."""
    return {
        re.sub(r"[0-9a-f]{8,}", "N", str(path.relative_to(folder))) for path in folder.rglob("*")
    }
