"""Conversions that are killed at random instants, or whose disk is full."""

import multiprocessing
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model.reference_models import FAMILIES

from megatron.extras.interop.commands import convert_checkpoint

pytest.importorskip("transformers")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
KILLS = 4
MANY_KILLS = 40


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of `transformers`, and the same model as a checkpoint."""
    folder = tmp_path_factory.mktemp("theirs")
    FAMILIES["llama"].build().save_pretrained(folder / "hf")
    command = ["from-hf", "--model", str(folder / "hf"), "--out", str(folder / "checkpoint")]
    assert convert_checkpoint.main(command) == 0
    return folder


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "to-hf": lambda theirs: ["--load", str(theirs / "checkpoint")],
    "from-hf": lambda theirs: ["--model", str(theirs / "hf")],
    "from-megatron-deepspeed": lambda _: ["--load", str(FIXTURES / "deepspeed-zero1")],
    "from-megatron-lm": lambda _: ["--load", str(FIXTURES / "core-torch-dist")],
}


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def check_kills(command: list[str], folder: Path, kills: int) -> None:
    """Kill a conversion at random instants, and check what each leaves."""
    right = folder / "right"
    began = time.monotonic()
    assert convert_checkpoint.main([*command, "--out", str(right)]) == 0
    duration = time.monotonic() - began
    expected = read_files(right)
    out = folder / "out"
    instants = random.Random(7)
    interrupted = 0
    for number in range(kills):
        # The process has all modules of this one, so the conversion begins immediately.
        process = multiprocessing.get_context("fork").Process(
            target=convert_checkpoint.main, args=([*command, "--out", str(out)],)
        )
        process.start()
        if number % 2 == 0:
            process.join(instants.uniform(0.1, 1.1) * duration)
        else:
            # Most of an import is the comparison. These kills come while files are written.
            while process.is_alive() and not (folder / "out.unfinished").exists():
                pass
            time.sleep(instants.uniform(0, 0.02))
        process.kill()
        process.join()
        left = {path.name for path in folder.iterdir()} - {"right"}
        if "out" in left:
            assert left == {"out"}
        else:
            assert left <= {"out.unfinished"}
            interrupted += len(left)
            assert convert_checkpoint.main([*command, "--out", str(out)]) == 0
        assert {path.name for path in folder.iterdir()} == {"right", "out"}
        assert read_files(out).keys() == expected.keys()
        for name, content in read_files(out).items():
            # The manifest has the time at which it was written.
            assert content == expected[name] or name.endswith("manifest.json"), name
        shutil.rmtree(out)
    assert interrupted > 0, "no kill came while files were written"


@pytest.mark.parametrize("subcommand", COMMANDS)
def test_a_killed_conversion_leaves_nothing_under_its_name(
    subcommand: str, theirs: Path, tmp_path: Path
) -> None:
    check_kills([subcommand, *COMMANDS[subcommand](theirs)], tmp_path, KILLS)


@pytest.mark.full
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_kills_at_many_instants(subcommand: str, theirs: Path, tmp_path: Path) -> None:
    check_kills([subcommand, *COMMANDS[subcommand](theirs)], tmp_path, MANY_KILLS)


def convert_with_small_files(command: list[str]) -> None:
    # The signal of this limit would end the process without a message.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    sys.exit(convert_checkpoint.main(command))


@pytest.mark.parametrize("subcommand", COMMANDS)
def test_a_full_disk_is_reported_and_leaves_nothing(
    subcommand: str, theirs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [subcommand, *COMMANDS[subcommand](theirs), "--out", str(tmp_path / "out")]
    process = multiprocessing.get_context("fork").Process(
        target=convert_with_small_files, args=(command,)
    )
    process.start()
    process.join()
    assert process.exitcode == 2
    assert "File too large" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
