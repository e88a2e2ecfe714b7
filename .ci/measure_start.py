"""Measure how much code a start and a training step execute.

Run `python .ci/measure_start.py` from the repository's root. It trains four steps of a tiny model
in this process, on the indexed data of the tests, and prints three rows of a table: the start, the
first step, and one later step. Each row has the files and functions of the package that were
entered, and the code lines of these functions. The code of modules, which runs at their import,
is not counted. A function is counted once, however often it is called.
"""

import ast
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

from measure_style import count_code_lines

ROOT = Path.cwd()
DATA = ROOT / "tests" / "fixtures" / "openwebtext-100"
ITERATIONS = 4
PHASES = ("start", "first step", "later step")
STEP = "train_batch"
"""Name of the engine's method that executes a step. Its calls divide the run into phases."""


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
    ranges: dict[str, set[tuple[int, int]]] = {}
    for code in codes:
        if code.co_name != "<module>":
            ranges.setdefault(code.co_filename, set()).add((code.co_firstlineno, 0))
    functions = 0
    lines = 0
    for name, starts in ranges.items():
        text = Path(name).read_text()
        entered = {line for line, _ in starts}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            if first not in entered:
                continue
            functions += 1
            segment = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
            lines += count_code_lines(_dedent(segment))
    return len(ranges), functions, lines


def _dedent(segment: str) -> str:
    indent = len(segment) - len(segment.lstrip())
    return "\n".join(line[indent:] for line in segment.splitlines())


def main() -> None:
    """Train, and print the table and the CPU time of the package's imports."""
    # torch's own imports are not ours.
    import torch.distributed  # noqa: F401

    sys.path.insert(0, str(ROOT))
    begin = time.process_time()
    from megatron.commands.pretrain import main as train

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        argv = (
            f"--data-path {DATA}/meg-gpt2-openwebtext_text_document --split 90,10,0"
            f" --vocab-file {DATA}/gpt2-tiny-vocab.json --merge-file {DATA}/gpt2-tiny-merges.txt"
            " --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --lr 1e-3"
            f" --micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS}"
            f" --save {folder}/run --load {folder}/run --data-cache-path {folder}/cache"
        ).split()
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
    print(f"{'phase':12} {'files':>6} {'functions':>10} {'code lines':>11}")
    for name in PHASES:
        files, functions, lines = measure_functions(recorder.entered[name])
        print(f"{name:12} {files:6,} {functions:10,} {lines:11,}")
    print(f"CPU time of the whole run with the recorder: {time.process_time() - begin:.1f} s")


if __name__ == "__main__":
    main()
