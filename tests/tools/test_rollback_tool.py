"""tools/rollback.py as an operator uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from operations.run_folder import FakeRun, snapshot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    folder = tmp_path_factory.mktemp("trained")
    run = FakeRun(folder / "run", folder / "aside")
    run.launch(1, 8)
    return run


@pytest.fixture
def run(trained: FakeRun, tmp_path: Path) -> FakeRun:
    return trained.copy(tmp_path)


def paths(run: FakeRun) -> list[str]:
    return [
        word
        for name, value in run.paths().items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]


def tool(
    *arguments: object, cwd: Path | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`before`: code that runs first."""
    code = f"{before}\nimport runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
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


def test_back_and_again(run: FakeRun) -> None:
    command = [run.root, "--to", 4, "--skip", "5-6", "--reason", "spike", *paths(run)]
    dry = tool(*command, "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert "nothing was changed (--dry-run)" in dry.stdout
    done = tool(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(
        "go on with the run's own command and these flags:\n  --skip-train-iteration-range 5-6\n"
    )
    assert (run.root / "latest").read_text() == "global_step4"
    after = snapshot(run.root, run.aside)
    again = tool(*command)
    assert again.returncode == 0
    assert "there is nothing to do" in again.stdout
    assert snapshot(run.root, run.aside) == after


def test_paths_may_be_relative_to_where_it_is_given(run: FakeRun) -> None:
    relative = [
        "--main-log",
        "aside/main_log.txt",
        "--tensorboard-dir",
        "aside/tb",
        "--codecarbon-dir",
        "aside/carbon",
    ]
    done = tool(
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
        (["--to", "4", "--main-log", "absent"], "absent is no file"),
        (["--to", "4", "--lr", "-1"], "must be above 0"),
    ],
)
def test_bad_input_is_one_message_and_changes_nothing(
    run: FakeRun, arguments: list[str], message: str
) -> None:
    before = snapshot(run.root, run.aside)
    result = tool(run.root, *paths(run), *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(run.root, run.aside) == before


def test_without_tensorboard_it_says_what_is_missing(run: FakeRun) -> None:
    before = snapshot(run.root, run.aside)
    absent = "import sys; sys.modules['tensorboard'] = None"
    result = tool(run.root, "--to", 4, *paths(run), before=absent)
    assert result.returncode == 2
    assert "pip install -e '.[observe]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(run.root, run.aside) == before
    without = tool(
        run.root,
        "--to",
        4,
        *paths(run)[:2],
        *paths(run)[4:],
        "--tensorboard-dir",
        "nowhere",
        before=absent,
    )
    assert without.returncode == 0, without.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(run: FakeRun) -> None:
    run.root.chmod(0o555)
    result = tool(run.root, "--to", 4, *paths(run))
    run.root.chmod(0o755)
    assert result.returncode == 2
    assert "Permission denied" in result.stderr


def test_a_full_disk_is_said_and_the_same_command_goes_on(run: FakeRun) -> None:
    """No file may grow beyond 20,000 bytes, and what stays of the log is larger."""
    run.log.write_text("noise\n" * 10_000 + run.log.read_text())
    ignore, size = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))",
    )
    result = tool(
        run.root, "--to", 4, *paths(run), before=f"import resource, signal; {ignore}; {size}"
    )
    assert result.returncode == 2
    assert "File too large" in result.stderr
    assert "fix that, and give the same command again" in result.stderr
    assert "is unfinished" in (run.root / "latest").read_text()
    again = tool(run.root, "--to", 4, *paths(run))
    assert again.returncode == 0, again.stderr
    assert (run.root / "latest").read_text() == "global_step4"
    assert run.log.read_text().startswith("noise\n" * 10_000 + "srun: launch 1\n")
    assert not list(run.root.parent.rglob(".rollback*"))
    assert not list(run.root.parent.rglob("*.new"))


def test_torch_is_not_loaded(run: FakeRun) -> None:
    """The tool is there in a second, on a login node, too."""
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    assert tool(run.root, "--to", 4, "--dry-run", *paths(run), before=watch).stdout.endswith(
        "False\n"
    )
