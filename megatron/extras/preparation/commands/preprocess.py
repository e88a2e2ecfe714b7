r"""Tokenize text into indexed data sets PREFIX_{key}_document.bin and .idx.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus \
        --vocab-file vocab.json --merge-file merges.txt --append-eod

Inputs are JSON records (one in each line, or one array), .parquet, .arrow, and plain text (.txt,
.text and .md, one document in each file). JSON and plain text may be compressed as .gz or .zst. In
a folder, the files with known suffixes are read. A folder of Hugging Face's save_to_disk is read as
one data set.

With --conversations, each record is a conversation, and PREFIX_conversations.bin and .idx say which
tokens count in the loss (docs/instruct.md).

With --engine, each input file gives a data set of its own (a shard), and PREFIX.json lists them.
Training reads PREFIX.json as one data set. Inputs may be URLs then, such as s3:// and hf://.

If a run is killed, the same command continues it. PREFIX_{key}_document.tokenizer.json records the
tokenizer. Training refuses another one where this file is beside the data.
"""

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_count, print_line, print_to_stderr
from megatron.config.data import TokenizerConfig
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.console.tokenizer_flags import TokenizerFlags
from megatron.extras.preparation.conversations.build import (
    ConversationJob,
    prepare_conversations,
)
from megatron.extras.preparation.conversations.marks import LossOn
from megatron.extras.preparation.corpus.engines import EngineName
from megatron.extras.preparation.corpus.prepare import prepare_corpus
from megatron.extras.preparation.corpus.shards import CorpusJob
from megatron.extras.preparation.preprocess.build_dataset import (
    PreprocessJob,
    count_default_workers,
    preprocess,
)


@dataclass(frozen=True)
class PreprocessArguments:
    """The command line."""

    input: tuple[str, ...]
    """Files, globs and folders. The output keeps their order. The files of a glob or a folder are
    sorted by name."""
    output_prefix: str
    """Path of the output without _{key}_document.bin/.idx."""
    tokenizer: Annotated[TokenizerFlags, tyro.conf.arg(name="")] = field(
        default_factory=TokenizerFlags
    )
    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns) that hold the text. Each gives a data set of its own."""
    dataset_impl: Literal["mmap"] = "mmap"
    """Format of the output. mmap (.bin/.idx) is the only one."""
    append_eod: bool = False
    """End each document with the end-of-document token."""
    workers: int = field(default_factory=count_default_workers)
    """Number of processes that encode. Default: one for each core."""
    overwrite: bool = False
    """Replace a finished data set of the same name."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What to do with a line that is not JSON or lacks a key. Either way the line is reported with
    its file and number."""
    special_tokens_in_text: bool = False
    """Let a text that spells a special token, such as <|endoftext|>, have this token. By default it
    is ordinary text. Either way they are counted."""
    engine: EngineName | None = None
    """Make one shard for each input file: with processes of this machine (local), as a job array of
    Slurm, or on Ray (the cluster of RAY_ADDRESS, or this machine). All machines must see the same
    folders. --workers is the number of tasks. Exit code 1 means that a file failed."""
    conversations: bool = False
    """Read conversations: records with messages, or with prompt and completion. See
    docs/instruct.md."""
    chat_template: str | None = None
    """With --conversations: file of a chat template. Default: that of the tokenizer."""
    loss_on: LossOn = "assistant"
    """With --conversations: what counts in the loss. assistant: the answers, with the token that
    ends each. last: the last answer. all: everything."""
    longest: int | None = None
    """With --conversations: tokens of the longest conversation, --seq-length + 1 of the
    training."""
    on_long: Literal["refuse", "drop", "cut"] = "refuse"
    """With --longest: what to do with longer conversations. drop and cut report their number."""
    slurm_args: str = ""
    """Further arguments of sbatch, as in --slurm-args="--partition=cpu --time=4:00:00 --mem=8G"."""


def main(argv: list[str] | None = None) -> int:
    """Tokenize the files that `argv` names and return the exit code."""
    given = parse_arguments(PreprocessArguments, args=argv, description=__doc__)
    engine = given.engine
    if given.conversations:
        return run_tool(lambda: _prepare_conversations(given))
    if engine is not None:
        return run_tool(lambda: _prepare_corpus(given, engine))
    return run_tool(lambda: _preprocess(given))


def _make_tokenizer_config(given: PreprocessArguments) -> TokenizerConfig:
    for name in ("chat_template", "loss_on", "longest", "on_long"):
        if getattr(given, name) != getattr(PreprocessArguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(given, name)} needs --conversations. Give it too.")
    return replace(
        given.tokenizer.make_config(), special_tokens_in_text=given.special_tokens_in_text
    )


def _preprocess(given: PreprocessArguments) -> int:
    job = PreprocessJob(
        input=given.input,
        output_prefix=given.output_prefix,
        tokenizer=_make_tokenizer_config(given),
        json_keys=given.json_keys,
        append_eod=given.append_eod,
        workers=given.workers,
        on_bad_line=given.on_bad_line,
        overwrite=given.overwrite,
    )
    if given.slurm_args:
        raise ConfigError(
            f"--slurm-args={given.slurm_args} needs --engine slurm. Give it, or leave out "
            "--slurm-args."
        )
    try:
        done = preprocess(job)
    except KeyboardInterrupt:
        # The journal on disk makes the same command continue, so a traceback would be noise.
        print_to_stderr("interrupted; the same command continues from the last journal entry")
        return exit_codes.INTERRUPTED
    for key, prefix in done.prefixes.items():
        documents = format_count(done.documents[key], "document")
        print_line(f"{prefix}: {documents}, {format_count(done.tokens[key], 'token')}")
    if done.special_tokens is not None:
        print_line(done.special_tokens)
    # Speeds are per byte of text, not per byte of JSON.
    megabytes = done.text_bytes / 1e6
    speed = done.megabytes_per_second
    print_line(
        f"{megabytes:.1f} MB of text, {format_count(done.bad_lines, 'bad line')}, "
        f"{done.seconds:.1f} s "
        f"({speed:.1f} MB/s, encoder {done.encoder})"
    )
    return 0


def _prepare_conversations(given: PreprocessArguments) -> int:
    # Nothing that was given is ignored.
    for flag, wrong, reason in (
        ("--engine", given.engine is not None, "conversations are prepared on one machine"),
        ("--append-eod", given.append_eod, "a template ends turns, and a completion always ends"),
        ("--json-keys", given.json_keys != ("text",), "conversations have keys of their own"),
    ):
        if wrong:
            raise ConfigError(f"{flag} has no effect with --conversations: {reason}. Leave it out.")
    job = ConversationJob(
        input=given.input,
        output_prefix=given.output_prefix,
        tokenizer=given.tokenizer.make_config(),
        chat_template=given.chat_template,
        loss_on=given.loss_on,
        longest=given.longest,
        on_long=given.on_long,
        workers=given.workers,
        on_bad_line=given.on_bad_line,
        special_tokens_in_text=given.special_tokens_in_text,
        overwrite=given.overwrite,
    )
    # Notes and bad lines go to standard error, and the result to standard output.
    done = prepare_conversations(job, print_to_stderr)
    print_line(
        f"{job.prefix}: {format_count(done.conversations, 'conversation')}, "
        f"{format_count(done.tokens, 'token')}, of which {done.counted / done.tokens:.1%} count; "
        f"the longest has {format_count(done.longest, 'token')}; {done.dropped} dropped, "
        f"{done.cut} cut, {format_count(done.bad_lines, 'bad line')}"
    )
    return 0


def _prepare_corpus(given: PreprocessArguments, engine: EngineName) -> int:
    if len(given.json_keys) != 1 or "/" in given.json_keys[0]:
        raise ConfigError(
            f"--json-keys {' '.join(given.json_keys)}: --engine {engine} takes one key without "
            "'/'. Run it once for each key, with other --output-prefix."
        )
    job = CorpusJob(
        folder=os.path.abspath(given.output_prefix),
        key=given.json_keys[0],
        append_eod=given.append_eod,
        on_bad_line=given.on_bad_line,
        tokenizer=_make_tokenizer_config(given),
    )
    try:
        corpus = prepare_corpus(
            job,
            given.input,
            engine,
            given.workers,
            print_to_stderr,
            slurm_args=given.slurm_args,
            overwrite=given.overwrite,
        )
    except KeyboardInterrupt:
        print_to_stderr("interrupted; the same command keeps the shards that are complete")
        return exit_codes.INTERRUPTED
    for name, reason in corpus.failed.items():
        print_to_stderr(f"FAILED: {name}: {reason}")
    print_line(
        f"{corpus.path}: {format_count(len(corpus.shards), 'shard')}, "
        f"{format_count(corpus.count('documents'), 'document')}, "
        f"{format_count(corpus.count('tokens'), 'token')}, "
        f"{format_count(corpus.count('bad_documents'), 'bad document')}, "
        f"{format_count(len(corpus.failed), 'failed file')}"
    )
    return exit_codes.FOUND if corpus.failed else 0


if __name__ == "__main__":
    sys.exit(main())
