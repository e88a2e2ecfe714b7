"""tools/rollback.py from its command line, as an operator uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from operations.run_folder import FakeRun, snapshot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """Make a run of one launch, with checkpoints at iterations 4 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    run = FakeRun(folder / "run", folder / "aside")
    run.launch(1, 8)
    return run


@pytest.fixture
def run(trained: FakeRun, tmp_path: Path) -> FakeRun:
    """Copy the run, so that each test changes its own."""
    return trained.copy(tmp_path)


def paths(run: FakeRun) -> list[str]:
    """Return the flags for the paths of the run's records."""
    return [
        word
        for name, value in run.paths().items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]


def run_tool(
    *arguments: object, cwd: Path | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the tool in another process, which first runs the code `before`."""
    code = (
        f"{before}\nimport runpy, sys; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(ROOT / "tools" / "rollback.py"),
        *map(str, arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment
    )


def test_a_dry_run_a_rollback_and_a_repetition(run: FakeRun) -> None:
    """A dry run changes nothing, and the same command again finds nothing to do."""
    command = [run.root, "--to", 4, "--skip", "5-6", "--reason", "spike", *paths(run)]
    dry = run_tool(*command, "--dry-run")
    assert dry.returncode == 0
    assert dry.stderr == ""
    assert "nothing was changed (--dry-run)" in dry.stdout
    done = run_tool(*command)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.endswith("these flags:\n  --skip-train-iteration-range 5-6\n")
    assert (run.root / "latest").read_text() == "global_step4"
    after = snapshot(run.root, run.aside)
    again = run_tool(*command)
    assert again.returncode == 0
    assert "there is nothing to do" in again.stdout
    assert snapshot(run.root, run.aside) == after


def test_paths_may_be_relative_to_the_working_directory(run: FakeRun) -> None:
    """The tool accepts relative paths for the run and for its records."""
    relative = [
        "--main-log",
        "aside/main_log.txt",
        "--tensorboard-dir",
        "aside/tb",
    ]
    done = run_tool(
        "run", "--to", 4, "--metrics-file", "run/metrics.jsonl", *relative, cwd=run.root.parent
    )
    assert done.returncode == 0, done.stderr
    assert "launch 1" in run.log.read_text()
    assert len(list((run.root / "rolled-back").glob("*/main_log.txt"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "6"], "there are: global_step4, global_step8"),
        (["--to", "4", "--skip", "1-6"], "begins at 1"),
        (["--to", "4", "--skip", "six"], "is not FIRST-LAST"),
        (["--to", "4", "--main-log", "absent"], "absent is not a file"),
        (["--to", "4", "--lr", "-1"], "must be above 0"),
    ],
)
def test_bad_input_is_one_message_and_changes_nothing(
    run: FakeRun, arguments: list[str], message: str
) -> None:
    """The message is printed without a traceback, and the exit code is 2."""
    before = snapshot(run.root, run.aside)
    result = run_tool(run.root, *paths(run), *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(run.root, run.aside) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_reported(run: FakeRun) -> None:
    """The tool ends with exit code 2."""
    run.root.chmod(0o555)
    result = run_tool(run.root, "--to", 4, *paths(run))
    run.root.chmod(0o755)
    assert result.returncode == 2
    assert "Permission denied" in result.stderr


def test_the_same_command_continues_after_a_full_disk(run: FakeRun) -> None:
    """The limit is 20,000 bytes for a file, and the part of the log that stays is larger."""
    run.log.write_text("noise\n" * 10_000 + run.log.read_text())
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))"
    )
    result = run_tool(run.root, "--to", 4, *paths(run), before=limit)
    assert result.returncode == 2
    assert "File too large" in result.stderr
    assert "give the same command again" in result.stderr
    assert "is unfinished" in (run.root / "latest").read_text()
    again = run_tool(run.root, "--to", 4, *paths(run))
    assert again.returncode == 0, again.stderr
    assert (run.root / "latest").read_text() == "global_step4"
    assert run.log.read_text().startswith("noise\n" * 10_000 + "srun: launch 1\n")
    assert not list(run.root.parent.rglob(".rollback*"))
    assert not list(run.root.parent.rglob("*.new"))


def test_the_tool_does_not_import_torch(run: FakeRun) -> None:
    """Without torch the tool starts in a second, also on a login node."""
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    result = run_tool(run.root, "--to", 4, "--dry-run", *paths(run), before=watch)
    assert result.stdout.endswith("False\n")
