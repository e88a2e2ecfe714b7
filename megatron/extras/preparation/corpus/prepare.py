"""Makes a corpus: shares the files among tasks, runs the tasks, and writes the manifest."""

import json
import os
import shutil
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_json
from megatron.base.plain_text import format_count
from megatron.extras.preparation.corpus.engines import EngineName, run_tasks
from megatron.extras.preparation.corpus.manifest import Corpus, Shard
from megatron.extras.preparation.corpus.shards import (
    SCRATCH,
    CorpusJob,
    InputFile,
    list_changes,
    list_inputs,
)
from megatron.extras.preparation.preprocess.build_dataset import NO_EOD
from megatron.extras.preparation.preprocess.input_files import leave_out_output
from megatron.extras.preparation.preprocess.journal import lock_output
from megatron.tokenizer.build import build_tokenizer

_SETTINGS = "made_with.json"
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
    if slurm_args and engine != "slurm":
        raise ConfigError(
            f"--slurm-args={slurm_args} needs --engine slurm, and the engine is {engine}. Give it, "
            "or leave out --slurm-args."
        )
    # The tasks may have another working directory.
    files: dict[str, Any] = {
        name: os.path.abspath(path)
        for name in ("vocab_file", "merge_file", "tokenizer_name_or_path")
        if os.path.exists(path := getattr(job.tokenizer, name) or "")
    }
    job = replace(job, tokenizer=replace(job.tokenizer, **files))
    # A wrong tokenizer is found here, and not by each task.
    build_tokenizer(job.tokenizer)
    folder = Path(job.folder)
    manifest = Path(f"{folder}.json")
    listed = list_inputs(patterns, log)
    # The folder of index caches begins with the name of the manifest.
    own = tuple(f"{folder}{end}" for end in ("/", ".json/", ".json."))
    used = set(leave_out_output([source.path for source in listed], own, log))
    inputs = [source for source in listed if source.path in used]
    if not job.append_eod:
        log(NO_EOD)
    with lock_output(job.folder):
        made_with = job.made_with
        _check_output(folder, manifest, made_with, overwrite)
        folder.mkdir(exist_ok=True)
        replace_file(folder / _SETTINGS, json.dumps(made_with, indent=1) + "\n")
        # An interrupted run must not leave an old manifest beside new shards.
        manifest.unlink(missing_ok=True)
        # A killed task leaves its folder, which may fill the disk.
        _remove_scratch(folder)
        # A file that failed earlier may have been corrected, or its server may respond again.
        for source in inputs:
            if isinstance(job.find_result(source, made_with), str):
                job.get_record(source).unlink()
        try:
            _run_rounds(job, inputs, engine, workers, log, slurm_args)
        finally:
            _remove_scratch(folder)
        results = {source: job.find_result(source, made_with) for source in inputs}
        lost = (
            f"its task ended {_ROUNDS} times without a result, for example because of too little "
            "memory or a full disk; see its output"
        )
        failed = {
            s.label: each or lost for s, each in results.items() if not isinstance(each, Shard)
        }
        # An input that is given twice has its documents twice.
        given = [results[source] for source in inputs]
        shards = tuple(each for each in given if isinstance(each, Shard))
        if not shards:
            raise ConfigError(
                f"none of the {format_count(len(results), 'input file')} gave a shard. The first: "
                f"{': '.join(next(iter(failed.items())))}"
            )
        corpus = Corpus(manifest, shards, failed)
        corpus.write(made_with)
    return corpus


def _check_output(folder: Path, manifest: Path, made_with: dict[str, Any], overwrite: bool) -> None:
    """Check that the output may be written.

    Raises:
        ConfigError: The paths are in use, or have a corpus with other settings.
    """
    record = folder / _SETTINGS
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--output-prefix {folder} is a file, and with --engine it is the folder of the "
            "shards. Give another --output-prefix."
        )
    if not record.exists():
        # It may be an input, such as corpus.json for the prefix corpus.
        if os.path.lexists(manifest):
            raise ConfigError(
                f"{manifest} would be replaced by the manifest, and {folder} has no corpus. Give "
                "another --output-prefix, or remove this file if you do not need it."
            )
        return
    if overwrite:
        return
    try:
        before = dict(load_json(record))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{record} is damaged ({error}), so the settings of the corpus are not known. Give "
            "another --output-prefix, or replace the corpus with --overwrite."
        ) from error
    if changed := list_changes(before, made_with):
        raise ConfigError(
            f"{manifest} was made, or started, with another {', '.join(changed)}. Give "
            "another --output-prefix, or replace the corpus with --overwrite."
        )


def _run_rounds(
    job: CorpusJob,
    inputs: Sequence[InputFile],
    engine: EngineName,
    workers: int,
    log: Callable[[str], None],
    slurm_args: str,
) -> None:
    """Run tasks until each file has a result, or the number of rounds is over."""
    made_with = job.made_with
    missing = list(dict.fromkeys(inputs))
    suspects = set[InputFile]()
    for number in range(1, _ROUNDS + 1):
        tasks = _share(missing, workers, suspects)
        file = Path(job.folder, "tasks", f"round-{number}.json")
        file.parent.mkdir(exist_ok=True)
        if any(source.has_secret for source in inputs):
            file.parent.chmod(0o700)
        content = {"job": asdict(job), "tasks": [[asdict(s) for s in each] for each in tasks]}
        replace_file(file, json.dumps(content))
        try:
            run_tasks(engine, file.absolute(), len(tasks), slurm_args, log)
        finally:
            # It has the complete URLs, which may have secrets.
            file.unlink(missing_ok=True)
        missing = [each for each in missing if job.find_result(each, made_with) is None]
        if not missing:
            return
        # A task ends without a result at the first file that it has not made. This file may be the
        # reason, and must not prevent the others again.
        left = set(missing)
        suspects |= {next(s for s in task if s in left) for task in tasks if left & set(task)}
        log(
            f"warning: {format_count(len(missing), 'file')} without a shard, such as "
            f"{missing[0]}; the task ended without a result (attempt {number} of {_ROUNDS})"
        )


def _remove_scratch(folder: Path) -> None:
    """Remove the folders of tasks that were killed."""
    for left in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def _share(
    inputs: Sequence[InputFile], workers: int, last: Set[InputFile]
) -> list[list[InputFile]]:
    """Assign each file, the largest first, to the task that has the fewest bytes.

    The files of `last` come at the end.
    """
    tasks: list[list[InputFile]] = [[] for _ in range(min(workers, len(inputs)))]
    loads = [0] * len(tasks)
    for source in sorted(inputs, key=lambda each: (each in last, -each.size)):
        least = loads.index(min(loads))
        tasks[least].append(source)
        loads[least] += source.size
    return tasks
