"""Files of conversations to an indexed data set.

Invariant: the output does not depend on the number of workers. It has its final name only when it
is complete. An interrupted run starts again.
"""

import collections
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from tqdm import tqdm

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDatasetWriter, get_idx_path
from megatron.data.tokenizer_record import describe_tokenizer, write_record
from megatron.extras.preparation.conversations.marks import LossOn, Renderer, find_counted
from megatron.extras.preparation.conversations.rows import (
    Conversation,
    Rows,
    check_characters,
    list_contents,
    parse_row,
    read_rows,
)
from megatron.extras.preparation.preprocess.input_files import expand_inputs, leave_out_output
from megatron.extras.preparation.preprocess.inputs import BadLine
from megatron.extras.preparation.preprocess.journal import lock_output
from megatron.extras.samples.chat.template import (
    THOUGHTS,
    end_process,
    load_chat_template,
    read_special_tokens,
)
from megatron.parallel.launcher import die_with_parent
from megatron.tokenizer.build import HFTokenizer, build_tokenizer
from megatron.tokenizer.failures import TokenizerError

_MEMORY = 2 << 30
"""Bytes that a worker may need for its rows, besides its libraries. A tokenizer is foreign, too."""
_SHOWN_BAD_LINES = 100
_WAITING = 4
"""Results for each worker that are waited for at once."""


@dataclass(frozen=True)
class ConversationJob:
    """What to prepare. The output is PREFIX_conversations.bin and .idx."""

    input: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig
    chat_template: str | None = None
    loss_on: LossOn = "assistant"
    longest: int | None = None
    on_long: Literal["refuse", "drop", "cut"] = "refuse"
    workers: int = 1
    on_bad_line: Literal["stop", "skip"] = "stop"
    special_tokens_in_text: bool = False
    overwrite: bool = False

    @property
    def prefix(self) -> str:
        """Path of the data set."""
        return f"{self.output_prefix}_conversations"


@dataclass
class ConversationSummary:
    """What was done, in numbers."""

    conversations: int = 0
    tokens: int = 0
    counted: int = 0
    """Tokens that count in the loss."""
    longest: int = 0
    dropped: int = 0
    """Conversations that were left out because they are too long."""
    cut: int = 0
    bad_lines: int = 0
    lost_thoughts: int = 0
    """Conversations with a thought, for a template that writes none."""


@dataclass
class _Encoded:
    """Some rows, encoded."""

    ids: list[np.ndarray] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    summary: ConversationSummary = field(default_factory=ConversationSummary)


class RowEncoder:
    """Turns rows into ids, of which those that do not count are complements."""

    def __init__(self, job: ConversationJob) -> None:
        """Load the tokenizer and the template.

        Raises:
            ConfigError: One of them is missing, or does not fit.
        """
        self._job = job
        tokenizer = build_tokenizer(job.tokenizer)
        self._specials = read_special_tokens(tokenizer)
        assert isinstance(tokenizer, HFTokenizer)
        self._tokenizer = tokenizer
        # Loaded late, because rows of prompts and completions need no template.
        self._renderer: Renderer | None = None

    def load_template(self) -> Renderer:
        """Return the renderer. The template is needed only if a row has messages.

        Raises:
            ConfigError: There is no template.
        """
        if self._renderer is None:
            template = load_chat_template(self._job.tokenizer, self._job.chat_template)
            self._renderer = Renderer(template, self._specials, self._job.loss_on)
        return self._renderer

    def describe_end(self) -> str | None:
        """Return a note about a template that ends no turn with a special token."""
        try:
            renderer = self.load_template()
        except ConfigError:
            # Rows of prompts and completions need no template.
            return None
        if renderer.template.is_tagged or renderer.ends_turns:
            return None
        return (
            f"note: {renderer.template.origin} writes no special token after an answer, so the "
            "model does not learn where an answer ends"
        )

    def encode_rows(self, rows: Rows) -> _Encoded:
        """Return the conversations of some rows, and those that are bad."""
        done = _Encoded()
        for line, value in enumerate(rows.values, rows.first):
            try:
                conversation = parse_row(value)
                if conversation is not None:
                    self._add(done, self.encode(conversation))
                    thinks = any(each.get(THOUGHTS[0]) for each in conversation.messages)
                    lost = thinks and not self.load_template().writes_thoughts
                    done.summary.lost_thoughts += lost
            except (DataError, TokenizerError) as error:
                done.bad.append(BadLine(rows.path, line, str(error)))
            except MemoryError:
                done.bad.append(BadLine(rows.path, line, "it needs too much memory"))
        done.summary.bad_lines = len(done.bad)
        return done

    def encode(self, conversation: Conversation) -> np.ndarray:
        """Return the ids of a conversation, int32[n].

        Raises:
            DataError: It cannot be rendered, or a text spells a special token.
        """
        check_characters(conversation)
        if not self._job.special_tokens_in_text:
            self._refuse_special_tokens(conversation)
        if conversation.messages:
            text, spans = self.load_template().render(conversation.messages, conversation.tools)
        else:
            text = conversation.prompt + conversation.completion
            start = len(conversation.prompt) * (self._job.loss_on != "all")
            spans = [(start, len(text))]
        # As a whole, as a program does that asks the model.
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
        ids, counted = encoding.ids, find_counted(encoding.offsets, spans)
        if not conversation.messages:
            # No template ends a completion.
            ids, counted = [*ids, self._tokenizer.eod], [*counted, True]
        # A run would learn nothing from it.
        if not any(counted[1:]):
            raise DataError("no token of it counts")
        # Nothing predicts the first token.
        counted[0] = False
        # The complement of 0 is -1, so each id can be marked.
        found = np.array(ids, np.int32)
        return np.where(counted, found, ~found)

    def _refuse_special_tokens(self, conversation: Conversation) -> None:
        for text in list_contents(conversation):
            found = next((token for token in self._specials if token in text), None)
            if found is not None:
                raise DataError(
                    f"a text spells the special token {found!r}, and would end or begin a turn. "
                    "Give --special-tokens-in-text if such texts may have special tokens"
                )

    def _add(self, done: _Encoded, ids: np.ndarray) -> None:
        """Add a conversation, unless it is too long.

        Raises:
            DataError: It is too long, and such ones are refused.
        """
        longest = self._job.longest
        if longest is not None and len(ids) > longest:
            if self._job.on_long == "refuse":
                raise DataError(
                    f"it has {len(ids)} tokens, more than --longest {longest}. --on-long drop "
                    "leaves such conversations out, and --on-long cut cuts them"
                )
            if self._job.on_long == "drop" or not np.any(ids[:longest] >= 0):
                done.summary.dropped += 1
                return
            done.summary.cut += 1
            ids = ids[:longest]
        done.summary.longest = max(done.summary.longest, len(ids))
        done.ids.append(ids)
        done.summary.conversations += 1
        done.summary.tokens += len(ids)
        done.summary.counted += int(np.count_nonzero(ids >= 0))


_encoder: RowEncoder | None = None
"""The encoder of a worker process."""


def _start_worker(job: ConversationJob, parent: int) -> None:
    """Load what a worker needs, and limit its memory."""
    global _encoder
    die_with_parent(parent)
    _encoder = RowEncoder(job)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))


def _encode(rows: Rows) -> _Encoded:
    assert _encoder is not None, "_start_worker has run"
    return _encoder.encode_rows(rows)


def prepare_conversations(job: ConversationJob, log: Callable[[str], None]) -> ConversationSummary:
    """Write the data set of a job.

    Raises:
        ConfigError: A flag is wrong, or the output exists.
        DataError: A row is no conversation, or none is left.
    """
    # One token for the input and one for the label.
    if job.longest is not None and job.longest < 2:
        raise ConfigError(f"--longest {job.longest} must be at least 2.")
    if job.on_long != "refuse" and job.longest is None:
        raise ConfigError(
            f"--on-long {job.on_long} needs --longest, the tokens of the longest one."
        )
    if not job.overwrite and get_idx_path(job.prefix).exists():
        raise ConfigError(
            f"{get_idx_path(job.prefix)} exists already. Give another --output-prefix, or "
            "replace it with --overwrite."
        )
    paths = leave_out_output(expand_inputs(job.input, log), (f"{job.prefix}.",), log)
    # Errors of the tokenizer and of a template are found here, and not in a worker.
    encoder = RowEncoder(job)
    if job.chat_template is not None:
        encoder.load_template()
        log(
            f"note: tools/generate.py and exports use the template of the tokenizer's folder: copy "
            f"{job.chat_template} to chat_template.jinja there"
        )
    if note := encoder.describe_end():
        log(note)
    # The workers have processes of their own.
    end_process()
    total = ConversationSummary()
    # Two runs must not write the same files.
    with lock_output(job.output_prefix):
        with (
            IndexedDatasetWriter(job.prefix, np.int32) as writer,
            tqdm(unit=" conversations", disable=None) as bar,
        ):
            for done in _run(job, read_rows(paths)):
                _report_bad(job, total, done.bad, log)
                for value in fields(ConversationSummary):
                    combine = max if value.name == "longest" else sum
                    pair = [getattr(each, value.name) for each in (total, done.summary)]
                    setattr(total, value.name, combine(pair))
                for ids in done.ids:
                    writer.add_document(ids)
                bar.update(len(done.ids))
            if not total.conversations:
                raise DataError(
                    f"{', '.join(job.input)}: no conversation is left, so no data set is written: "
                    f"{total.bad_lines} bad lines, and {total.dropped} of more tokens than "
                    "--longest or without a token that counts in them."
                )
            # After a crash, the record of an older data set must not stay beside the new one.
            write_record(job.prefix, None)
        write_record(job.prefix, describe_tokenizer(job.tokenizer))
    _report_thoughts(total, log)
    return total


def _run(job: ConversationJob, rows: Iterable[Rows]) -> Iterator[_Encoded]:
    """Yield the encoded rows in order.

    Raises:
        DataError: A worker ended.
    """
    # A forked worker need not import the libraries again. No thread has started yet.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting: collections.deque[tuple[Rows, Future[_Encoded]]] = collections.deque()
    pool = ProcessPoolExecutor(job.workers, context, _start_worker, (job, os.getpid()))
    try:
        # Results come in the order of the rows, and few of them wait.
        for each in rows:
            waiting.append((each, pool.submit(_encode, each)))
            if len(waiting) > _WAITING * job.workers:
                yield _wait(*waiting.popleft())
        while waiting:
            yield _wait(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _wait(rows: Rows, future: "Future[_Encoded]") -> _Encoded:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"{rows.path}: a worker ended in one of the rows from {rows.first} on. A text may need "
            f"more than {_MEMORY >> 30} GiB of memory"
        ) from error


def _report_thoughts(total: ConversationSummary, log: Callable[[str], None]) -> None:
    """Log how many conversations have thoughts that are lost."""
    if total.lost_thoughts:
        log(
            f"note: {total.lost_thoughts} conversations have thoughts, and the chat template "
            "writes none of them"
        )


def _report_bad(
    job: ConversationJob, total: ConversationSummary, bad: list[BadLine], log: Callable[[str], None]
) -> None:
    """Log bad lines, or end the run at the first.

    Raises:
        DataError: There is one, and --on-bad-line is stop.
    """
    if bad and job.on_bad_line == "stop":
        raise DataError(f"{str(bad[0]).rstrip('.')}. --on-bad-line skip leaves such rows out.")
    for each in bad[: max(0, _SHOWN_BAD_LINES - total.bad_lines)]:
        log(f"bad line, left out: {each}")
