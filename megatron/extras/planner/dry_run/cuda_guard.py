"""The compiled device guard that lets torch use fake CUDA tensors without a GPU.

torch looks for CUDA's hooks once, when it is imported. `load_guard` must therefore run in a new
process, before torch is imported there. This module imports no torch itself.
"""

import atexit
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron.base.errors import ConfigError

_SOURCE = Path(__file__).parent / "csrc" / "cuda_guard.cpp"


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, or None. The environment variable CXX comes first."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def build_guard() -> Path:
    """Compile the guard for the installed torch, and return the path of the library.

    It is compiled once, which takes a few seconds. Later calls find it in the user's cache.

    Raises:
        ConfigError: There is no C++ compiler, or it fails.
    """
    source = _SOURCE.read_bytes()
    torch_folder = _find_torch()
    # A library for another version of torch must not be loaded, because the layout of its classes
    # may differ.
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(source + f"{version} {torch_folder}".encode()).hexdigest()[:16]
    library = _find_cache() / f"cuda_guard-{key}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(
            "--dry-run needs a C++ compiler (c++, g++ or clang++) and found none; install one, or "
            "set CXX to its path"
        )
    # Compiled in a folder of its own, because processes of several hosts may compile at the same
    # time. A compiler that is interrupted leaves nothing.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        part = Path(folder) / library.name
        _compile(compiler, torch_folder, version, part)
        part.rename(library)
    return library


def _compile(compiler: str, torch_folder: Path, version: str, library: Path) -> None:
    """Compile the guard. Raise ConfigError if that fails."""
    command = [
        compiler,
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        f"-I{torch_folder / 'include'}",
        str(_SOURCE),
        "-o",
        str(library),
        f"-L{torch_folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]
    # The message of a compiler is shown only if it fails, because torch's headers cause warnings.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[0]
        raise ConfigError(
            f"--dry-run: {compiler} could not compile {_SOURCE.name} for torch {version}: "
            f"{reason}; install a compiler that knows C++20, or set CXX to one"
        )


def load_guard(library: Path) -> None:
    """Load the guard into this process, in which torch must not be imported yet, and import it."""
    assert "torch" not in sys.modules, "torch has already looked for CUDA in this process"
    # The guard uses symbols of this library, and importing torch later uses the same copy.
    ctypes.CDLL(str(_find_torch() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    guard.install_guard()


def _find_torch() -> Path:
    """Return the folder of torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ConfigError("--dry-run needs torch, which is not installed; pip install torch")
    return Path(found.origin).parent


def _find_cache() -> Path:
    """Return the folder of compiled guards. Only this user can write to it."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "megatron-3d"
        folder.mkdir(parents=True, exist_ok=True)
        # On a read-only home, the guard is compiled again by each dry run.
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        # A user without an entry in the password file has no home.
        pass
    temporary = tempfile.mkdtemp(prefix="megatron-3d-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)
