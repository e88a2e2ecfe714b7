"""Dry runs in processes of their own, because the fake GPU changes torch for a whole process.

A compiled device guard lets torch use fake CUDA tensors without a GPU. torch looks for CUDA's hooks
once, when it is imported. `load_guard` must therefore run in a new process, before torch is
imported there. This module imports no torch itself.
"""

import atexit
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, TrainingError
from megatron.base.plain_text import print_to_stderr
from megatron.extras.planner.dry_run.record import find_line_of_error
from megatron.parallel.grid import GridCoordinate
from megatron.parallel.launcher import die_with_parent
from megatron.plan.kernel_choice import KernelDevice, apply_kernel_choice, choose_kernels
from megatron.plan.run_plan import Plan
from megatron.schedule.pipeline_schedule import choose_schedule

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


_FAKE_GPU = KernelDevice("9.0")


def list_rank_kinds(plan: Plan) -> list[int]:
    """Return a rank of each kind: first, middle and last stage, first and last data rank.

    Of context-parallel ranks, the first one needs most memory.
    """
    # The other axes have ranks of one kind.
    grid = plan.grid
    stages = sorted({0, grid.pipeline // 2, grid.pipeline - 1})
    data_ranks = sorted({0, grid.data - 1})
    return [
        grid.get_rank(GridCoordinate(stage, data, 0)) for stage in stages for data in data_ranks
    ]


def choose_microbatches(plan: Plan) -> int:
    """Return how many microbatches of the final batch show everything that a step does.

    A stage has at most as many microbatches in flight as there are stages, and one more shows what
    is repeated. ZeRO 2 drops weights during the last one, so it needs another one. Interleaved
    schedules need a multiple of the pipeline size. Looped BFS keeps all microbatches, so all of
    them are run.
    """
    of_step = plan.get_num_microbatches(plan.batch_size.final)
    schedule = choose_schedule(of_step, plan.pipeline_size, plan.stages_per_rank)
    if schedule.name == "looped BFS":
        return of_step
    if plan.stages_per_rank > 1:
        return min(of_step, 2 * plan.pipeline_size)
    repeated = 1 + (plan.zero_stage == 2)
    return min(of_step, plan.pipeline_size + repeated)


def open_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that can import `megatron.extras.planner.dry_run.fake_rank`.

    Raises:
        ConfigError: See `build_guard`.
    """
    return ProcessPoolExecutor(
        workers,
        # A fork would inherit torch, which has looked for CUDA already.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(build_guard(), os.getpid()),
    )


def _start_worker(library: Path, parent: int) -> None:
    """Prepare a process of the pool."""
    die_with_parent(parent)
    # Ctrl-C reaches all processes of a terminal. The one that was called ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        load_guard(library)
    except OSError as error:
        # The pool would print a traceback. It reports that this process has ended.
        print_to_stderr(f"error: {error}")
        os._exit(1)


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that came about.

    Otherwise the processes of a pool whose owner was killed would wait for work permanently.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a process of a pool"
    parent.join()
    os._exit(1)


def choose_fake_kernels(plan: Plan) -> Plan:
    """Return the plan with the kernels that a run on such GPUs uses.

    Raises:
        ConfigError: This version of torch has no shapes for a kernel that the plan asks for.
    """
    choice = choose_kernels(plan, _FAKE_GPU)
    version = importlib.metadata.version("torch")
    major, minor = version.split(".")[:2]
    if choice.kernels.gradient_accumulation_fusion and (int(major), int(minor)) < (2, 13):
        if plan.config.kernels.gradient_accumulation_fusion is None:
            kernels = replace(choice.kernels, gradient_accumulation_fusion=False)
            return apply_kernel_choice(plan, replace(choice, kernels=kernels))
        raise ConfigError(
            "--dry-run with --gradient-accumulation-fusion needs torch 2.13 or newer, and this is "
            f"{version}, which cannot compute the shapes of the fused product; install a newer "
            "torch, or leave out the flag for the dry run"
        )
    return apply_kernel_choice(plan, choice)


def call_in_pool(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in a process of the pool.

    Raises:
        TrainingError: The function raised.
    """
    return pool.submit(call_on_fake_gpu, function, *arguments).result()


def call_on_fake_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of the pool, and describe an error of it as text.

    torch's own errors may hold objects that cannot be sent to another process.

    Raises:
        TrainingError: The function raised.
    """
    # torch logs each error of a fake operator with its traceback. The error is raised anyway.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return function(*arguments)
    except Exception as error:
        line = find_line_of_error(error)
        where = ""
        if line is not None:
            where = f" at {line}"
        raise TrainingError(
            f"the step fails on a fake GPU{where}: {type(error).__name__}: {error}"
        ) from None
