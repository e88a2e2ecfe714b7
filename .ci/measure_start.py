"""Measure how much code a start and a training step execute, and how long a start takes.

Run `python .ci/measure_start.py` from the repository's root. It trains four steps of a tiny model
in this process, on the indexed data of the tests, and prints three rows of a table: the start, the
first step, and one later step. Each row has the functions of the package that were entered, the
files that they are in, and the code lines of these functions. The code of modules and the bodies
of classes run at an import and are not counted. A file of which nothing else ran is not counted
either. A function is counted once, however often it is called.

With `--times` it also prints CPU times: of the package's imports after those of torch, and of eight
ranks until their first step. Beside them are eight ranks that import torch, meet by gloo and end
(bare), and eight that also shard a layer with FSDP2, as every data-parallel run does (sharded).
"""

import argparse
import ast
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from measure_style import count_code_lines

ROOT = Path.cwd()
DATA = ROOT / "tests" / "fixtures" / "openwebtext-100"
ITERATIONS = 4
RANKS = 8
REPEATS = 3
PHASES = ("start", "first step", "later step")
STEP = "train_batch"
"""Name of the engine's method that executes a step. Its calls divide the run into phases."""
IMPORTS = """
import time
import torch.distributed
begin = time.process_time()
import megatron.commands.pretrain, megatron.run.pretrain, megatron.engine.native
print(time.process_time() - begin)
"""
_READY = """
    import torch.distributed as dist
    dist.barrier()
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = [used.ru_utime + used.ru_stime, time.monotonic()]
    with open(os.environ["REPORT"], "w") as file:
        json.dump(report, file)
    # No rank ends before the others have passed the barrier.
    dist.barrier()
    os._exit(0)
"""
BARE = f"""
import json, os, resource, time
import torch.distributed as dist

def end():{_READY}
dist.init_process_group("gloo")
end()
"""
"""A rank that imports torch, meets the others and ends."""
SHARDED = f"""
import json, os, resource, time
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def end():{_READY}
dist.init_process_group("gloo")
fully_shard(nn.Linear({RANKS}, {RANKS}))
end()
"""
"""The same with a layer that FSDP2 shards. Its imports are most of the start of such a run."""
START = f"""
import json, os, resource, time
import megatron.commands.pretrain as command

def end(*_, **__):{_READY}
def import_and_end(*arguments):
    import_training(*arguments)
    from megatron.engine.native import NativeEngine
    NativeEngine.{STEP} = end

import_training = command.import_training
command.import_training = import_and_end
command.main()
"""
"""A rank of a run that ends before its first step."""


class Recorder:
    """Collects the functions of the package that are entered, phase by phase."""

    def __init__(self) -> None:
        """Begin with the start."""
        self.entered: dict[str, set[CodeType]] = {name: set() for name in PHASES}
        self._steps = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call. `sys.setprofile` calls this."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/megatron/"):
            return
        if code.co_name == STEP:
            self._steps += 1
        # A step begins after the call of the step before it, so that the loop around it counts.
        phase = min(self._steps, 2)
        if self._steps <= ITERATIONS - 1:
            self.entered[PHASES[phase]].add(code)


def measure_functions(codes: set[CodeType]) -> tuple[int, int, int]:
    """Return the numbers of files, functions and code lines of functions.

    A function in a function, a lambda or a comprehension is part of the outer one.
    """
    starts: dict[str, set[int]] = {}
    for code in codes:
        if code.co_name != "<module>":
            starts.setdefault(code.co_filename, set()).add(code.co_firstlineno)
    files = 0
    functions = 0
    lines = 0
    for name, entered in starts.items():
        text = Path(name).read_text()
        found = list(_find_functions(ast.parse(text), entered))
        # None is found if only the body of a class ran.
        files += bool(found)
        functions += len(found)
        for first, last in found:
            lines += count_code_lines(_dedent("\n".join(text.splitlines()[first - 1 : last])))
    return files, functions, lines


def _find_functions(tree: ast.AST, entered: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last lines of the functions that begin at certain lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            if first in entered:
                assert node.end_lineno is not None
                yield first, node.end_lineno
                # What is inside is counted with it.
                continue
        yield from _find_functions(node, entered)


def _dedent(segment: str) -> str:
    indent = len(segment) - len(segment.lstrip())
    return "\n".join(line[indent:] for line in segment.splitlines())


def measure_imports(environment: dict[str, str]) -> float:
    """Return the CPU seconds of the package's imports in a process that has imported torch."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure_ranks(script: str, environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Start ranks that run a script until all of them are ready.

    Returns:
        The CPU seconds of a rank until then, on average, and the wall seconds of the last rank.
        CPU seconds hardly depend on what else the machine does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    begin = time.monotonic()
    started = []
    for rank in range(RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "REPORT": str(folder / str(rank))}
        command = [sys.executable, "-c", script, *list_flags(folder, RANKS)]
        process = subprocess.Popen(
            command, env={**environment, **shared, **own}, stdout=subprocess.DEVNULL
        )
        started.append(process)
    for process in started:
        if process.wait() != 0:
            raise SystemExit(f"a rank ended with {process.returncode}")
    reports = [json.loads((folder / str(rank)).read_text()) for rank in range(RANKS)]
    cpu = sum(seconds for seconds, _ in reports) / RANKS
    return cpu, max(end for _, end in reports) - begin


def list_flags(folder: Path, batch: int) -> list[str]:
    """Return the flags of a run of a tiny model on indexed data."""
    return (
        f"--data-path {DATA}/meg-gpt2-openwebtext_text_document --split 90,10,0"
        f" --vocab-file {DATA}/gpt2-tiny-vocab.json --merge-file {DATA}/gpt2-tiny-merges.txt"
        " --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --lr 1e-3"
        f" --micro-batch-size 1 --global-batch-size {batch} --train-iters {ITERATIONS}"
        f" --save {folder}/run --load {folder}/run --data-cache-path {folder}/cache"
    ).split()


def print_times() -> None:
    """Print the CPU time of the imports, and of ranks that start, beside ranks of a bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        # An installed package has compiled modules. The first call of each kind compiles them.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        scripts = {"bare": BARE, "sharded": SHARDED, "start": START}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in scripts}
        measure_imports(environment)
        imports = [measure_imports(environment) for _ in range(REPEATS)]
        # Both are measured in turn, because other work on the machine changes the times.
        for repeat in range(REPEATS + 1):
            for name, script in scripts.items():
                run = Path(folder, f"{name}-{repeat}")
                run.mkdir()
                times = measure_ranks(script, environment, run)
                if repeat > 0:
                    found[name].append(times)
    print(f"CPU time of the package's imports after torch: {statistics.median(imports):.2f} s")
    medians = {}
    for name, times in found.items():
        cpu, wall = (statistics.median(column) for column in zip(*times, strict=True))
        medians[name] = cpu, wall
        print(f"{RANKS} ranks, {name:7}: {cpu:.2f} s of CPU time a rank, {wall:.1f} s until ready")
    for name in ("bare", "sharded"):
        cpu, wall = (a - b for a, b in zip(medians["start"], medians[name], strict=True))
        print(f"start after {name:7}: {cpu:.2f} s of CPU time a rank, {wall:.1f} s until ready")


def measure_phases() -> dict[str, tuple[int, int, int]]:
    """Train four steps, and return the files, functions and code lines that each phase enters."""
    # torch's own imports are not ours.
    import torch.distributed  # noqa: F401

    sys.path.insert(0, str(ROOT))
    from megatron.commands.pretrain import main as train

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        argv = list_flags(Path(folder), 4)
        output = os.dup(1)
        # The log of the run is not wanted.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            train(argv)
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            sys.stdout.flush()
            os.dup2(output, 1)
    return {name: measure_functions(recorder.entered[name]) for name in PHASES}


def main() -> None:
    """Print the table and the times."""
    parser = argparse.ArgumentParser(description="Measure the start of a run.")
    parser.add_argument("--times", action="store_true", help="also print the CPU times")
    with_times = parser.parse_args().times
    print(f"{'phase':12} {'files':>6} {'functions':>10} {'code lines':>11}")
    for name, (files, functions, lines) in measure_phases().items():
        print(f"{name:12} {files:6,} {functions:10,} {lines:11,}")
    if with_times:
        print_times()


if __name__ == "__main__":
    main()
