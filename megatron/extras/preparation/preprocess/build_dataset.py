"""Text files to indexed data sets: read, encode in several processes, write in order.

Invariant: after an interruption, everything that the journal has recorded is kept. Everything after
it is truncated. The outputs are therefore those of an uninterrupted run.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from tqdm import tqdm

from megatron.base.errors import ConfigError, DataError
from megatron.base.plain_text import print_to_stderr
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import choose_dtype, get_bin_path, get_idx_path
from megatron.data.tokenizer_record import describe_tokenizer, write_record
from megatron.extras.preparation.preprocess.encoders import (
    EncoderMismatchError,
    choose_encoder,
    sample_texts,
)
from megatron.extras.preparation.preprocess.input_files import expand_inputs, leave_out_output
from megatron.extras.preparation.preprocess.inputs import BLOCK_BYTES, BadLine, read_blocks
from megatron.extras.preparation.preprocess.journal import (
    Journal,
    PreprocessProgress,
    ResumableWriter,
    compute_run_fingerprint,
    lock_output,
    publish,
)
from megatron.extras.preparation.preprocess.workers import Encoded, EncodingJob, encode_blocks
from megatron.extras.samples.stream.filters import SpecialTokenCounter
from megatron.tokenizer.build import Tokenizer, build_tokenizer

NO_EOD = (
    "note: without --append-eod no token separates the documents, so the model cannot learn where "
    "a text ends"
)
_SHOWN_BAD_LINES = 100
# Blocks for each worker. With fewer, starting a worker takes longer than it saves.
_BLOCKS_EACH = 4
# An interruption loses at most this much work.
_JOURNAL_SECONDS = 15.0


def refuse_existing(prefix: str) -> None:
    """Refuse to write over a data set.

    Raises:
        ConfigError: One of its files exists.
    """
    for path in (get_idx_path(prefix), get_bin_path(prefix)):
        if path.exists():
            raise ConfigError(
                f"{path} exists already. If input and tokenizer are unchanged, use it as it is "
                f"with --data-path {prefix}. Otherwise give another --output-prefix, or replace it "
                "with --overwrite."
            )


@dataclass(frozen=True)
class PreprocessJob:
    """What to preprocess.

    The outputs are PREFIX_{key}_document.bin and .idx for each key, and .tokenizer.json, which
    names the tokenizer. `input` has files, globs and folders, in the order of the output.
    """

    input: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    on_bad_line: Literal["stop", "skip"] = "stop"
    overwrite: bool = False
    block_bytes: int = BLOCK_BYTES
    journal_seconds: float = _JOURNAL_SECONDS

    @property
    def prefixes(self) -> dict[str, str]:
        """The path of the data set of each key, without .bin and .idx."""
        return {key: f"{self.output_prefix}_{key}_document" for key in self.json_keys}


@dataclass(frozen=True)
class Summary:
    """What a run has done.

    `documents` and `tokens` are by key. `seconds` and `megabytes_per_second` are those of this run
    only, which may have continued an earlier one.
    """

    documents: dict[str, int]
    tokens: dict[str, int]
    bad_lines: int
    text_bytes: int
    special_tokens: str | None
    """What became of the special tokens that texts spell. None if there are none."""
    seconds: float
    megabytes_per_second: float
    encoder: str
    prefixes: dict[str, str]


def preprocess(
    job: PreprocessJob,
    log: Callable[[str], None] | None = None,
    choose: Callable[..., str] = choose_encoder,
) -> Summary:
    """Run the job, or continue it where an earlier run was interrupted.

    Args:
        job: What to preprocess.
        log: Receives messages. None prints them to stderr.
        choose: Chooses the encoder. See `choose_encoder`.

    Raises:
        ConfigError: the flags are wrong, or the output exists.
        DataError: the inputs are wrong.
    """
    log = log or print_to_stderr
    _check_job(job)
    own = tuple(f"{prefix}." for prefix in job.prefixes.values())
    paths = leave_out_output(expand_inputs(job.input, log), own, log)
    tokenizer = build_tokenizer(job.tokenizer)
    # Two runs that append to the same partial files would destroy both outputs.
    with lock_output(job.output_prefix):
        journal = Journal(
            job.output_prefix,
            compute_run_fingerprint(paths, job.json_keys, job.append_eod, job.tokenizer),
        )
        progress = journal.load()
        if progress is None:
            # This check is only for a new run. A run that is continued has passed it at its start.
            for prefix in () if job.overwrite else job.prefixes.values():
                refuse_existing(prefix)
            progress = PreprocessProgress()
        if not job.append_eod:
            log(NO_EOD)
        # A mismatch restarts the run without that encoder, since ids written before may be wrong,
        # too. The loop ends, because the tokenizer itself cannot mismatch.
        while True:
            try:
                return _run(job, paths, tokenizer, journal, progress, log, choose)
            except EncoderMismatchError as error:
                log(
                    f"WARNING: {error.name} cannot be trusted with this corpus: {error.reason}. "
                    "STARTING OVER without it."
                )
                progress = progress.restart(error.name)
                journal.save(progress)


def _check_job(job: PreprocessJob) -> None:
    """Check the flags that can be checked without reading the inputs."""
    if job.workers < 1:
        raise ConfigError(f"--workers {job.workers} must be at least 1.")
    if not job.json_keys or len(set(job.json_keys)) < len(job.json_keys):
        raise ConfigError(
            f"--json-keys {' '.join(job.json_keys)} must name at least one key, and none twice."
        )
    if any("/" in key for key in job.json_keys):
        raise ConfigError(
            f"--json-keys {' '.join(job.json_keys)}: a key is part of a file name, so it must not "
            "contain '/'."
        )


def _run(
    job: PreprocessJob,
    paths: list[str],
    tokenizer: Tokenizer,
    journal: Journal,
    progress: PreprocessProgress,
    log: Callable[[str], None],
    choose: Callable[..., str],
) -> Summary:
    """Encode what is missing, and publish the outputs."""
    prefixes = job.prefixes
    started = time.monotonic()
    encoder = "none"
    before = progress.text_bytes
    if not progress.complete:
        if progress.outputs:
            at = progress.position
            log(
                f"continuing an interrupted run: {progress.lines} lines are done, up to "
                f"{at.line} of {paths[at.file]}"
            )
        encoder = choose(tokenizer, sample_texts(paths, job.json_keys), progress.rejected, log)
        progress = _encode_all(job, paths, tokenizer, encoder, journal, progress, log, prefixes)
    # The journal goes last. If it is interrupted here, the next run finds `complete` and publishes
    # again.
    made_with = describe_tokenizer(job.tokenizer)
    for prefix in prefixes.values():
        # After a crash, the record of an older data set must not stay beside the new one.
        write_record(prefix, None)
        publish(prefix)
        write_record(prefix, made_with)
    journal.delete()
    outputs = progress.outputs
    seconds = time.monotonic() - started
    return Summary(
        documents={key: outputs[key][1] for key in job.json_keys},
        tokens={key: outputs[key][0] for key in job.json_keys},
        bad_lines=progress.bad_lines,
        text_bytes=progress.text_bytes,
        special_tokens=(
            SpecialTokenCounter(tokenizer).describe(progress.special_tokens)
            if progress.special_tokens
            else None
        ),
        seconds=seconds,
        megabytes_per_second=(progress.text_bytes - before) / 1e6 / max(seconds, 1e-9),
        encoder=encoder,
        prefixes=prefixes,
    )


def _encode_all(
    job: PreprocessJob,
    paths: list[str],
    tokenizer: Tokenizer,
    encoder: str,
    journal: Journal,
    progress: PreprocessProgress,
    log: Callable[[str], None],
    prefixes: dict[str, str],
) -> PreprocessProgress:
    """Encode from `progress` to the end of the inputs.

    Complete files are left under their partial names, with a journal that records it.
    """
    # Two bytes a token if all ids fit.
    dtype = choose_dtype(tokenizer.vocab_size)
    writers = {
        key: ResumableWriter(prefixes[key], dtype, *progress.outputs.get(key, (0, 0)))
        for key in job.json_keys
    }
    encoding = EncodingJob(job.tokenizer, encoder, job.json_keys, job.append_eod, dtype.name)
    blocks = read_blocks(paths, job.json_keys, progress.position, job.block_bytes)
    sizes = [Path(path).stat().st_size for path in paths]
    # The bytes of all files before each file.
    bytes_before = [0, *itertools.accumulate(sizes)]
    saved = time.monotonic()
    bar = tqdm(
        total=sum(sizes),
        initial=progress.disk_bytes,
        unit="B",
        unit_scale=True,
        desc="preprocess",
        mininterval=0.5,
    )
    workers = min(job.workers, max(1, sum(sizes) // (_BLOCKS_EACH * job.block_bytes)))
    encoded_blocks = encode_blocks(encoding, blocks, workers)
    try:
        for encoded in encoded_blocks:
            # Everything before this block is saved. With --on-bad-line skip, the next run
            # continues at this block.
            if encoded.bad and job.on_bad_line == "stop":
                _stop_at(encoded.bad[0], journal, progress, writers)
            _report_bad(encoded.bad, progress.bad_lines, log)
            for key, tokens, lengths in zip(
                job.json_keys, encoded.tokens, encoded.sizes, strict=True
            ):
                writers[key].add_documents(tokens, lengths)
            before = progress.disk_bytes
            # All bytes of the files before the current one count as done.
            progress = _advance(progress, encoded, bytes_before[encoded.end.file], writers)
            bar.update(progress.disk_bytes - before)
            if time.monotonic() - saved >= job.journal_seconds:
                _save(journal, progress, writers)
                saved = time.monotonic()
        # With --on-bad-line skip, a wrong key would otherwise give an empty data set.
        if not any(writer.num_tokens for writer in writers.values()):
            raise DataError(
                f"{', '.join(paths[:3])}: {progress.lines} lines, {progress.bad_lines} of them "
                "bad, gave no document. Check --input and --json-keys."
            )
        for writer in writers.values():
            writer.write_index()
        # From here on, an interrupted run has only to rename the files.
        progress = replace(progress, complete=True)
        journal.save(progress)
        return progress
    finally:
        bar.close()
        # This stops the worker processes, also after an error.
        encoded_blocks.close()
        for writer in writers.values():
            writer.close()
        if not progress.documents:
            for writer in writers.values():
                writer.discard()


def _advance(
    progress: PreprocessProgress,
    encoded: Encoded,
    disk_bytes_before: int,
    writers: dict[str, ResumableWriter],
) -> PreprocessProgress:
    """Return the progress after a block."""
    return replace(
        progress,
        position=encoded.end,
        outputs={key: (writer.num_tokens, writer.num_documents) for key, writer in writers.items()},
        lines=progress.lines + encoded.lines,
        bad_lines=progress.bad_lines + len(encoded.bad),
        text_bytes=progress.text_bytes + encoded.text_bytes,
        disk_bytes=disk_bytes_before + encoded.disk_bytes,
        special_tokens=progress.special_tokens + encoded.special_tokens,
    )


def _save(
    journal: Journal, progress: PreprocessProgress, writers: dict[str, ResumableWriter]
) -> None:
    """Sync the outputs, then save the journal.

    What the journal records must be on disk first.
    """
    for writer in writers.values():
        writer.sync()
    journal.save(progress)


def _stop_at(
    bad: BadLine,
    journal: Journal,
    progress: PreprocessProgress,
    writers: dict[str, ResumableWriter],
) -> NoReturn:
    """Raise the error for a bad line. What is done before it is saved."""
    # Without documents, nothing is saved. The corrected command then starts from scratch.
    if not progress.documents:
        raise DataError(
            f"{bad}. Correct the file or the command and start again, or leave such lines out with "
            "--on-bad-line skip."
        )
    _save(journal, progress, writers)
    raise DataError(
        f"{bad}. With --on-bad-line skip the run continues from there. To fix the line instead, "
        f"delete {journal.path} and start from scratch."
    )


def _report_bad(bad: list[BadLine], before: int, log: Callable[[str], None]) -> None:
    """Report bad lines, up to _SHOWN_BAD_LINES of them in one run."""
    for number, line in enumerate(bad, before):
        if number < _SHOWN_BAD_LINES:
            log(f"bad line skipped: {line}")
        elif number == _SHOWN_BAD_LINES:
            log(f"bad line skipped: {line}; further bad lines are only counted")


def count_default_workers() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
