"""Makes a corpus: shares the files among tasks, runs the tasks, and writes the manifest."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError
from megatron.extras.corpus.engines import EngineName, run_tasks
from megatron.extras.corpus.manifest import Corpus, Shard
from megatron.extras.corpus.shards import SCRATCH, CorpusJob, list_changes
from megatron.extras.corpus.sources import InputFile, list_inputs
from megatron.extras.preprocess.journal import lock_output
from megatron.tokenizer import build_tokenizer

_ROUNDS = 3
"""How often a file is tried whose task ends without a result."""


def prepare_corpus(
    job: CorpusJob,
    patterns: Sequence[str],
    engine: EngineName,
    workers: int,
    log: Callable[[str], None],
    *,
    slurm_args: str = "",
    overwrite: bool = False,
) -> Corpus:
    """Make a corpus, or continue an interrupted run. The manifest is FOLDER.json.

    Args:
        job: What to make of each file.
        patterns: Files, globs, folders and URLs, in the order of the output.
        engine: Where the tasks run.
        workers: Number of tasks.
        log: Receives messages.
        slurm_args: Further arguments of sbatch.
        overwrite: Replace a corpus that was made with other settings or another tokenizer.

    Raises:
        ConfigError: The flags are wrong, no file gave a shard, or the folder has another corpus.
        DataError: The inputs cannot be listed.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers} must be at least 1.")
    # The tasks may have another working directory.
    files: dict[str, Any] = {
        name: os.path.abspath(path)
        for name in ("vocab_file", "merge_file", "tokenizer_name_or_path")
        if os.path.exists(path := getattr(job.tokenizer, name) or "")
    }
    job = replace(job, tokenizer=replace(job.tokenizer, **files))
    # A wrong tokenizer is found here, and not by each task.
    build_tokenizer(job.tokenizer)
    inputs = list_inputs(patterns, log)
    folder = Path(job.folder)
    with lock_output(job.folder):
        manifest = Path(f"{folder}.json")
        made_with = job.made_with
        record = folder / "made_with.json"
        if record.exists() and not overwrite:
            before = json.loads(record.read_bytes())
            if changed := list_changes(before, made_with):
                raise ConfigError(
                    f"{manifest} was made, or started, with another {', '.join(changed)}. Give "
                    "another --output-prefix, or replace the corpus with --overwrite."
                )
        folder.mkdir(exist_ok=True)
        replace_file(record, json.dumps(made_with, indent=1) + "\n")
        # An interrupted run must not leave an old manifest beside new shards.
        manifest.unlink(missing_ok=True)
        # A file that failed earlier may have been corrected, or its server may respond again.
        for source in inputs:
            if isinstance(job.find_result(source, made_with), str):
                job.get_record(source).unlink()
        missing = list(dict.fromkeys(inputs))
        for number in range(1, _ROUNDS + 1):
            tasks = _share(missing, workers)
            file = folder / "tasks" / f"round-{number}.json"
            file.parent.mkdir(exist_ok=True)
            content = {"job": asdict(job), "tasks": [[asdict(s) for s in each] for each in tasks]}
            replace_file(file, json.dumps(content))
            run_tasks(engine, file.absolute(), len(tasks), slurm_args, log)
            missing = [each for each in missing if job.find_result(each, made_with) is None]
            if not missing:
                break
            log(
                f"warning: {len(missing)} files have no shard, such as {missing[0]}; their tasks "
                f"ended without a result (attempt {number} of {_ROUNDS})"
            )
        for left in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        results = {source: job.find_result(source, made_with) for source in inputs}
        lost = f"its task ended {_ROUNDS} times without a result; see its output"
        failed = {
            str(s): each or lost for s, each in results.items() if not isinstance(each, Shard)
        }
        # An input that is given twice has its documents twice.
        given = [results[source] for source in inputs]
        shards = tuple(each for each in given if isinstance(each, Shard))
        if not shards:
            raise ConfigError(
                f"none of the {len(inputs)} input files gave a shard. The first: "
                f"{': '.join(next(iter(failed.items())))}"
            )
        corpus = Corpus(manifest, shards, failed)
        corpus.write(made_with)
    return corpus


def _share(inputs: Sequence[InputFile], workers: int) -> list[list[InputFile]]:
    """Assign each file, the largest first, to the task that has the fewest bytes."""
    tasks: list[list[InputFile]] = [[] for _ in range(min(workers, len(inputs)))]
    loads = [0] * len(tasks)
    for source in sorted(inputs, key=lambda each: -each.size):
        least = loads.index(min(loads))
        tasks[least].append(source)
        loads[least] += source.size
    return tasks
