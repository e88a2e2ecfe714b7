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
    assert "megatron/tokenizer/published.toml" in names
    # Megatron-LM's package megatron.core would not be found beside it.
    assert "megatron/__init__.py" not in names
    assert "megatron/commands/pretrain.py" in names
    presets = {path.name for path in (ROOT / "megatron" / "presets").iterdir()}
    assert {Path(name).name for name in names if name.startswith("megatron/presets/")} == presets
    assert {name.split("/")[0].split("-")[0] for name in names} == {"megatron", "megatron_3d"}


packaged = pytest.mark.when_changed(
    "pyproject.toml",
    "setup.py",
    "examples/*.sh",
    "megatron/base/code_version.py",
    "megatron/*/__init__.py",
    "tests/examples/test_wheel.py",
)
"""Tests of what an installation finds."""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of an environment that has only the dependencies."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    # The dependencies are those of the tests' own environment. Its checkout is not on this path,
    # because a .pth file inside a folder that a .pth file adds is not read.
    (packages / "dependencies.pth").write_text(
        f"{next(p for p in sys.path if 'site-packages' in p)}\n"
    )
    return environment / "bin" / "python"


def install(python: Path, *words: str | Path, **more: str) -> None:
    options = ["--disable-pip-version-check", "--no-deps", "--no-index", "--force-reinstall"]
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, *options, *words, cwd=python.parents[2], **more)


MEGATRON_CORE = {
    "megatron/core/__init__.py": "from megatron.core.package_info import __version__\n",
    "megatron/core/package_info.py": "__version__ = '0.0.1'\n",
    "megatron_core-0.0.1.dist-info/METADATA": "Name: megatron-core\nVersion: 0.0.1\n",
    "megatron_core-0.0.1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
}
"""The layout of the wheel of megatron-core 0.16.1: there is no megatron/__init__.py."""
BOTH = """
import megatron.core, megatron.plan, megatron.base.code_version as code
assert megatron.core.__version__ == "0.0.1"
assert not any(name.startswith("core/") for name in code.compute_file_digests())
print(code.PACKAGE)
"""


@packaged
@pytest.mark.parametrize("way", [pytest.param("wheel", marks=pytest.mark.full), "-e"])
def test_megatron_core_works_beside_the_package(
    wheel: Path, python: Path, tmp_path: Path, way: str
) -> None:
    core = tmp_path / "megatron_core-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(core, "w") as archive:
        for name, text in MEGATRON_CORE.items():
            archive.writestr(name, text)
        archive.writestr("megatron_core-0.0.1.dist-info/RECORD", "")
    source = wheel.parents[1]
    install(python, core)
    if way == "wheel":
        install(python, wheel)
    else:
        # The helpers need not be built again.
        install(python, "--no-build-isolation", "-e", source, CXX="false")
    where = run(python, "-c", BOTH, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(source if way == "-e" else python.parents[1])
    # Now megatron-core is the last one.
    install(python, core)
    assert run(python, "-c", BOTH, cwd=tmp_path).strip() == where


@packaged
def test_wheel_trains_in_an_empty_environment(wheel: Path, python: Path, tmp_path: Path) -> None:
    """An environment that has only the dependencies runs the one-device example."""
    install(python, wheel)
    where = run(python, "-c", "import megatron.base as b; print(b.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    example = tmp_path / "examples"
    run("cp", "-r", ROOT / "examples", example, cwd=tmp_path)
    printed = run(
        "bash",
        example / "pretrain_gpt.sh",
        "--train-iters",
        "2",
        cwd=tmp_path,
        path=f"{python.parent}:{os.environ['PATH']}",
        EXAMPLE_DIR=str(tmp_path / "run"),
    )
    assert "training is complete at iteration 2" in printed
