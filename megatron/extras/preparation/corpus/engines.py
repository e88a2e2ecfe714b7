"""The engines, which run tasks until all of them have ended, and the tasks.

    python -m megatron.extras.preparation.corpus.engines TASKS_FILE NUMBER [--end-with-input]

This runs one task, which makes the shards of its input files, one after the other. The file has the
job and the input files of each task as JSON. With --end-with-input, the task ends when its standard
input does, which is a pipe from the process that started it.

An engine does not have to report which tasks failed. The records in the folder of the shards show
which shards are missing, and the caller runs these files again.

Invariant: when an engine returns or raises, none of its tasks is still running, except on a machine
that does not respond.
"""

import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megatron.base.errors import ConfigError, MegatronError, describe_os_error
from megatron.base.outside_file import INDEX_BYTES, load_json
from megatron.base.plain_text import format_count, print_to_stderr
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.corpus.shards import CorpusJob, InputFile, ShardMaker

EngineName = Literal["local", "slurm", "ray"]
_TASK = (sys.executable, "-m", "megatron.extras.preparation.corpus.engines")
_RAY_RETRIES = 3


def run_tasks(
    engine: EngineName,
    tasks_file: Path,
    count: int,
    slurm_args: str,
    log: Callable[[str], None],
) -> None:
    """Run the tasks 0 to `count` - 1 of a file, and wait for them.

    Args:
        engine: Where the tasks run.
        tasks_file: The job and the input files of each task as JSON.
        count: The number of tasks. All run at the same time if there is room.
        slurm_args: Further arguments of sbatch.
        log: Receives messages.

    Raises:
        ConfigError: The engine is not installed, or does not accept the tasks.
    """
    run = {"local": _run_locally, "slurm": _run_on_slurm, "ray": _run_on_ray}[engine]
    run(tasks_file, count, slurm_args, log)


def _run_locally(tasks_file: Path, count: int, _: str, log: Callable[[str], None]) -> None:
    """Run each task in a process of this machine."""
    # The pipes close if this process is killed, and the tasks end. Ctrl-C reaches a process group.
    # The tasks have other ones, so that they print no traceback.
    processes = [
        subprocess.Popen(
            [*_TASK, str(tasks_file), str(i), "--end-with-input"],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        for i in range(count)
    ]
    try:
        for number, process in enumerate(processes):
            if code := process.wait():
                log(f"warning: task {number} ended with exit code {code}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run_on_slurm(
    tasks_file: Path, count: int, slurm_args: str, log: Callable[[str], None]
) -> None:
    """Run the tasks as a job array. Slurm starts the tasks of a lost node again."""
    # Slurm replaces names such as %j in the path.
    folder = str(tasks_file.parent).replace("%", "%%")
    try:
        given = shlex.split(slurm_args)
    except ValueError as error:
        raise ConfigError(
            f"--slurm-args={slurm_args} cannot be divided into words: {error}. Quote it as in a "
            "shell."
        ) from error
    command = [
        *("sbatch", "--parsable", "--wait", "--requeue", "--open-mode=append"),
        *("--job-name=preprocess", f"--array=0-{count - 1}", f"--output={folder}/slurm-%A_%a.log"),
        *given,
        *("--wrap", f"exec {shlex.join((*_TASK, str(tasks_file)))} $SLURM_ARRAY_TASK_ID"),
    ]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError as error:
        raise ConfigError(
            "--engine slurm needs the command sbatch, which is not on the PATH. Run this tool on a "
            "login node of the cluster, or use --engine local."
        ) from error
    assert process.stdout is not None, "it is a pipe"
    job = process.stdout.readline().partition(";")[0].strip()
    if not job:
        raise ConfigError(
            f"sbatch has not accepted the job (exit code {process.wait()}, its message is above). "
            "Correct --slurm-args, or give fewer --workers than the MaxArraySize of the cluster."
        )
    log(
        f"Slurm job {job} runs {format_count(count, 'task')}; the output is in "
        f"{tasks_file.parent}. If this command is killed, end them with scancel {job}"
    )
    try:
        code = process.wait()
    except BaseException:
        subprocess.run(["scancel", job], check=False)
        process.kill()
        raise
    if code:
        log(f"warning: a task of Slurm job {job} failed (sbatch --wait ended with {code})")


def _run_on_ray(tasks_file: Path, count: int, _: str, log: Callable[[str], None]) -> None:
    """Run the tasks on the Ray cluster of RAY_ADDRESS, or on this machine without it."""
    # Otherwise Ray does not print lines that resemble earlier lines of other tasks.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--engine ray needs the package ray. Install it: pip install 'megatron-3d[ray]'."
        ) from error
    # A worker has neither the working directory of this process nor its paths of Python modules.
    path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
    try:
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=True)
    # Ray raises errors of many classes if it cannot start.
    except Exception as error:
        raise ConfigError(
            f"Ray does not start, or its cluster does not answer: {error}. Start one with 'ray "
            "start --head', give its address as RAY_ADDRESS, or use another --engine."
        ) from error
    try:
        # Ray runs the task of a lost worker or node again, but not a task that raised an exception.
        work: Any = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(run_task)
        for number, task in enumerate([work.remote(str(tasks_file), i) for i in range(count)]):
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                log(f"warning: task {number} failed on Ray: {error}")
    finally:
        ray.shutdown()


def run_task(tasks_file: str, number: int) -> None:
    """Make the shards of a task. Files that fail are recorded, so they raise no error.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
        OSError: The folder of the shards cannot be written.
    """
    started = time.process_time()
    # A task has one core. Threads of `tokenizers` would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    content = load_json(tasks_file, INDEX_BYTES)
    job = CorpusJob(
        **{**content["job"], "tokenizer": TokenizerConfig(**content["job"]["tokenizer"])}
    )
    where = f"task {number} on {platform.node()}"
    maker = ShardMaker(job, lambda line: print_to_stderr(f"{where}: {line}"))
    for source in content["tasks"][number]:
        maker.make(InputFile(**source))
    # The elapsed time says little on a machine that other jobs use.
    print_to_stderr(f"{where}: ended after {time.process_time() - started:.1f} s of CPU")


def _end_with_input() -> None:
    """Wait for the end of standard input, and end the process.

    The kernel closes the pipe even if the other process is killed. The task must not go on then,
    because a later command may give the same shards other settings.
    """
    # Not through `sys.stdin`, whose lock the interpreter needs at its exit.
    while os.read(0, 1):
        pass
    os._exit(1)


def _main() -> None:
    """Run the task that the command line names."""
    if "--end-with-input" in sys.argv:
        threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        run_task(sys.argv[1], int(sys.argv[2]))
    except (MegatronError, OSError) as error:
        message = describe_os_error(error) if isinstance(error, OSError) else str(error)
        sys.exit(f"error: task {sys.argv[2]} on {platform.node()}: {message}")


if __name__ == "__main__":
    _main()
