"""Spare nodes read what a start needs: the environment's files, and the index of the data.

A step of srun on the spare nodes runs this module as a program while the others train. It imports
what a rank imports, reads the files of the index, and ends. A start on such a node then finds the
files in its memory, and not on the shared file system. Nothing else depends on it.
"""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.base.host_limits import read_total_memory
from megatron.base.outside_file import open_regular
from megatron.base.plain_text import format_bytes, print_line
from megatron.extras.operations.slurm.client import Allocation, find_training_folder

_CACHE_FLAG = "--data-cache-path"
_SHARE = 0.25
"""The largest part of a node's memory that the files of the index may use."""
_BLOCK = 1 << 24
_END_SECONDS = 10.0


@contextlib.contextmanager
def warm_spares(
    allocation: Allocation, srun: Sequence[str], command: Sequence[str], main_log: Path
) -> Iterator[None]:
    """Let the spare nodes read what a start needs, at most until the context ends.

    Args:
        allocation: The hosts of the job.
        srun: More options of srun.
        command: The training.
        main_log: The log of the run. It gets a line for each spare node that has read all.
    """
    used = allocation.train_hosts
    spares = {host: 1 for host in allocation.good_hosts if host not in used}
    if not spares:
        yield
        return
    options = [*allocation.format_srun_options(spares), "--kill-on-bad-exit=0", *srun]
    line = ["srun", *options, sys.executable, "-m", __name__, *command]
    # As for the training. Its paths may be relative.
    folder = find_training_folder()
    process = None
    # Without srun, the training reports the error.
    with contextlib.suppress(OSError), open(main_log, "ab") as log_file:
        # Its errors would be taken for those of the training.
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.DEVNULL, cwd=folder
        )
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step, because the next one may need its nodes."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a file system may not end. The training must not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


def list_index_files(words: Sequence[str]) -> list[Path]:
    """Return the files of the data's index that exist for a command line.

    Args:
        words: The words of the command. Each may have several paths.
    """
    folders = []
    found = []
    for before, word in zip(["", *words], words, strict=False):
        if before == _CACHE_FLAG:
            folders.append(Path(word))
        for prefix in re.split(r"[\s,=]+", word):
            found.append(Path(f"{prefix}.idx"))
            folders.append(Path(f"{prefix}.index-cache"))
    for folder in folders:
        if folder.is_dir():
            found += sorted(folder.iterdir())
    return [path for path in dict.fromkeys(found) if path.is_file()]


def read_files(paths: Sequence[Path], limit: float) -> int:
    """Read files until a number of bytes is reached, and return the number that was read.

    Raises:
        OSError: A file cannot be read.
    """
    count = 0
    for path in paths:
        with open_regular(path) as file:
            while count < limit and (block := file.read(_BLOCK)):
                count += len(block)
    return count


def main(words: Sequence[str]) -> None:
    """Import what ranks import, and read the index of a command line."""
    from megatron.config.parallel import ParallelConfig
    from megatron.run.start.launch import import_training

    # A layout that needs all of it.
    import_training(ParallelConfig(pipeline_model_parallel_size=2), world_size=4)
    paths = list_index_files(words)
    # The files may be replaced while they are read.
    with contextlib.suppress(OSError):
        size = read_files(paths, _SHARE * (read_total_memory() or 0))
        print_line(
            f"the spare node {os.environ.get('SLURMD_NODENAME', platform.node())} has read the "
            f"environment and {len(paths)} files of the index ({format_bytes(size)})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
