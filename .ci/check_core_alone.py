"""Check that the core needs nothing of `megatron.extras`: copy it without them, and use the copy.

Run `python .ci/check_core_alone.py` from the repository's root, in the environment of the tests. In
the copy, it

- asserts that `megatron` is the copy, and that `megatron.extras` cannot be imported,
- trains with TP 2 and PP 2 on indexed data, saves, resumes, and compares the losses of both runs,
- gives flags whose package is missing, and looks for the package's name in the message,
- runs those tests of the core that need no extras.

Only the data are prepared with the complete package.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMANDS = ("__init__.py", "parts.py", "pretrain.py")
"""The files of `megatron.commands` that the command of the training needs."""

SITE = """\
import sys

# An editable installation finds each module of the complete package that the copy does not have.
sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
# It adds the complete package to the places of the namespace package with this entry.
sys.path[:] = [entry for entry in sys.path if not entry.startswith("__editable__")]
"""
"""The module `sitecustomize` of the copy, which Python imports at its start."""

IDENTITY = """\
import megatron.base

print(megatron.base.__file__)
try:
    import megatron.extras
except ModuleNotFoundError as error:
    print(error.name)
"""

FLAGS = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 5000
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --lr-decay-style cosine
    --log-interval 1 --eval-interval 3 --eval-iters 1 --bf16
    --data-path {data}
"""
"""Flags of every command line."""
LAYOUT = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --untie-embeddings-and-output-weights --save-interval 3 --data-cache-path cache
"""
"""Flags of the training. The two stages have different numbers of layers."""
RESUMED = 3
"""The iteration of the checkpoint that the second run starts from."""

MISSING = {
    "--codecarbon-dir emissions": "watch.trackers",
    "--dataset-format parquet": "samples",
    "--deepspeed": "step.deepspeed",
    "--eval-tasks lambada": "inference.scoring",
    "--fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate": "step.float8",
    "--hf-export-interval 10": "interop.convert",
    "--local-dir local": "object_store",
    "--memory-snapshot": "watch.profiler",
    "--profile-iterations 2-3": "watch.profiler",
    "--spike-guard skip-step": "watch.guard",
    "--straggler-interval 7": "watch.stragglers",
    "--replay-interval 100": "watch.replay",
    "--hang-timeout 60": "watch.watchdog",
    "--rehearsal exact": "operations.handover",
    "--tracker wandb": "watch.trackers",
    "--save-retain-interval 5": "interop.translators",
    "--sharding_group_size 2": "interop.translators",
}
"""Flags of a command line -> the package of `megatron.extras` that they need.

The last two are flags of other trainers: Megatron-LM and fms-fsdp.
"""

TESTS = (
    "schedule",
    "data/test_blend.py",
    "data/test_documents.py",
    "data/test_endless.py",
    "data/test_epochs.py",
    "data/test_gpt_dataset.py",
    "data/test_indexed.py",
    "data/test_order.py",
    "data/test_phases.py",
    "data/test_segments.py",
    "data/test_shuffle.py",
    "data/test_source.py",
    "data/test_splits.py",
    "tokenizer/test_token_bytes.py",
    "tokenizer/test_vocabulary_size.py",
    "model/test_init.py",
    "model/test_packed_attention.py",
    "model/test_partition.py",
    "model/test_parts.py",
    "parallel/test_gloo_shards.py",
    "parallel/test_messages.py",
    "parallel/test_store_values.py",
    "parallel/test_tensor_parallel.py",
    "parallel/test_torch_private.py",
    "checkpoint/test_finite.py",
    "checkpoint/test_policy.py",
    "checkpoint/test_retention.py",
    "checkpoint/test_save_and_load.py",
    "checkpoint/test_saver.py",
    "checkpoint/test_stages.py",
    "engine/test_muon.py",
    "engine/test_optimizer.py",
    "observe/test_log_line.py",
    "observe/test_metrics.py",
    "observe/test_throughput.py",
    "observe/test_timers.py",
)
"""Tests of the core, by their paths below tests/. None of them imports extras."""


def copy_core(folder: Path) -> None:
    """Copy the package without extras, the command of the training, and the tests to a folder."""
    caches = shutil.ignore_patterns("__pycache__", "*.pyc")

    def select(path: str, names: list[str]) -> set[str]:
        left_out = caches(path, names)
        if Path(path) == Path("megatron"):
            left_out |= {"extras"}
        if Path(path) == Path("megatron/commands"):
            left_out |= set(names) - set(COMMANDS)
        return left_out

    shutil.copytree("megatron", folder / "megatron", ignore=select)
    for name in ("tests", ".ci"):
        shutil.copytree(name, folder / name, ignore=caches)
    for name in ("pretrain_gpt.py", "pyproject.toml"):
        shutil.copy(name, folder)
    (folder / "sitecustomize.py").write_text(SITE)


def write_data(folder: Path) -> Path:
    """Write a data set of the text in the tests with the complete package. Return its prefix."""
    fixtures = Path("tests/fixtures/openwebtext-100")
    prefix = folder / "corpus"
    run_python(
        "-m",
        "megatron.extras.preparation.commands.preprocess",
        "--input",
        fixtures / "openwebtext-100.jsonl",
        "--output-prefix",
        prefix,
        "--vocab-file",
        fixtures / "gpt2-tiny-vocab.json",
        "--merge-file",
        fixtures / "gpt2-tiny-merges.txt",
        "--append-eod",
        environment={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    written = [*folder.glob("corpus*.idx")]
    assert len(written) == 1, f"the preparation of the data has written {written}"
    return written[0].with_suffix("")


def run_python(*words: str | Path, environment: Mapping[str, str], folder: str | Path = ".") -> str:
    """Run Python with words. Return what it printed. The check fails if the exit code is not 0."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"failed without megatron.extras: python {' '.join(map(str, words))}")
    return done.stdout


def check_identity(folder: Path, environment: Mapping[str, str]) -> None:
    """Check that Python imports the copy, and cannot import the extras."""
    printed = run_python("-c", IDENTITY, environment=environment, folder=folder).split()
    expected = [str(folder / "megatron" / "base" / "__init__.py"), "megatron.extras"]
    if printed != expected:
        raise SystemExit(f"not the core alone: Python printed {printed} instead of {expected}")


def check_training(folder: Path, environment: Mapping[str, str], data: Path) -> None:
    """Train, resume from the middle in another folder, and compare the losses."""
    launch = "-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py"
    command = f"{launch} {FLAGS} {LAYOUT}".format(data=data).split()
    first = ["--save", "first"]
    second = ["--load", "first", "--load-iteration", str(RESUMED), "--save", "second"]
    for more in (first, second):
        run_python(*command, *more, environment=environment, folder=folder)
    losses = read_losses(folder / "first")
    resumed = read_losses(folder / "second")
    expected = {iteration: loss for iteration, loss in losses.items() if iteration > RESUMED}
    if sorted(losses) != [1, 2, 3, 4, 5, 6] or resumed != expected:
        raise SystemExit(f"the losses are {losses}, and {resumed} after a resume at {RESUMED}")


def read_losses(folder: Path) -> dict[int, float]:
    """Return iteration -> loss of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def check_refusals(folder: Path, environment: Mapping[str, str], data: Path) -> None:
    """Check that the message about each flag of `MISSING` names the package."""
    started = {}
    # None of them imports torch, so all of them can run at the same time.
    for flags in MISSING:
        words = f"pretrain_gpt.py {FLAGS} {flags}".format(data=data).split()
        started[flags] = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    wrong = []
    for flags, process in started.items():
        printed, _ = process.communicate()
        if process.returncode != 2 or f"megatron.extras.{MISSING[flags]}" not in printed:
            wrong.append(f"{flags}: exit code {process.returncode}: {printed.strip()}")
    if wrong:
        raise SystemExit("\n".join(["messages that do not name the missing package:", *wrong]))


def check_tests(folder: Path, environment: Mapping[str, str]) -> None:
    """Run the tests of the core."""
    selected = [f"tests/{name}" for name in TESTS]
    options = ["-n", "2", "--no-loadscope-reorder", "-m", "not full"]
    printed = run_python(
        "-m", "pytest", *options, *selected, environment=environment, folder=folder
    )
    print(printed.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    """Make all checks. Return the exit code."""
    assert not arguments, "this check takes no arguments"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_core(folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests")]),
            "OMP_NUM_THREADS": "1",
        }
        data = write_data(folder)
        check_identity(folder, environment)
        for what, check in {
            "messages about missing packages": lambda: check_refusals(folder, environment, data),
            "training with TP 2 and PP 2, and a resume": lambda: check_training(
                folder, environment, data
            ),
            "tests of the core": lambda: check_tests(folder, environment),
        }.items():
            started = time.monotonic()
            check()
            print(
                f"without megatron.extras: {what}, {time.monotonic() - started:.0f} s", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
