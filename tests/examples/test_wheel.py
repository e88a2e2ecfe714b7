"""The wheel installs and trains without the checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, path: str = os.environ["PATH"], **more: str) -> str:
    """Run a command outside of the checkout, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "PATH": path, **more},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    # Only what the build reads. The build would otherwise leave its files in the checkout.
    for name in tracked:
        if name.startswith("megatron/") or name in ("pyproject.toml", "setup.py", "README.md"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # The environment of the tests has what the build needs, so nothing is downloaded.
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
        cwd=source,
    )
    return next((source / "dist").glob("*.whl"))


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "megatron/py.typed" in names
    assert "megatron/commands/pretrain.py" in names
    presets = {path.name for path in (ROOT / "megatron" / "presets").iterdir()}
    assert {Path(name).name for name in names if name.startswith("megatron/presets/")} == presets
    assert {name.split("/")[0].split("-")[0] for name in names} == {"megatron", "megatron_3d"}


def test_wheel_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """An environment that has only the dependencies runs the one-device example."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    # The dependencies are those of the tests' own environment. Its checkout is not on this path,
    # because a .pth file inside a folder that a .pth file adds is not read.
    (packages / "dependencies.pth").write_text(
        f"{next(p for p in sys.path if 'site-packages' in p)}\n"
    )
    python = environment / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        wheel,
        cwd=tmp_path,
    )
    where = run(python, "-c", "import megatron; print(megatron.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    example = tmp_path / "examples"
    run("cp", "-r", ROOT / "examples", example, cwd=tmp_path)
    printed = run(
        "bash",
        example / "pretrain_gpt.sh",
        "--train-iters",
        "2",
        cwd=tmp_path,
        path=f"{environment / 'bin'}:{os.environ['PATH']}",
        EXAMPLE_DIR=str(tmp_path / "run"),
    )
    assert "training is complete at iteration 2" in printed
