"""One task of an engine: it makes the shards of its input files, one after the other.

    python -m megatron.extras.preparation.corpus.task TASKS_FILE NUMBER [--end-with-input]

The file has the job and the input files of each task as JSON. With --end-with-input, the task ends
when its standard input does, which is a pipe from the process that started it.
"""

import os
import platform
import sys
import threading
import time

from megatron.base.errors import MegatronError, describe_os_error
from megatron.base.outside_file import INDEX_BYTES, load_json
from megatron.base.plain_text import print_to_stderr
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.corpus.shards import CorpusJob, ShardMaker
from megatron.extras.preparation.corpus.sources import InputFile


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
