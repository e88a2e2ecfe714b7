"""Blocks in, token ids out, over several processes.

Invariants: results come in the order of the blocks whatever the number of workers, and no more than a few blocks for each worker
are in memory. A worker holds one block at a time, hence neither side can wait for the other while that waits for it; it ends when
the parent does, even by kill -9.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError, MegatronError
from megatron.preprocess.encoders import (
    REFERENCE,
    EncoderMismatch,
    check_encoder,
    make_encoder,
    run_encoder,
)
from megatron.preprocess.inputs import InputBlock, Position
from megatron.preprocess.texts import BadLine, extract_texts
from megatron.tokenizer import build_tokenizer

_CHECKED_CHARS = 50_000  # texts up to this length are checked again while a fast library is in use


@dataclass(frozen=True)
class EncodingJob:
    """What a worker needs to know."""

    tokenizer: TokenizerConfig
    encoder: str
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str


@dataclass(frozen=True)
class Encoded:
    """One block encoded: for each key all ids end to end (end-of-document ids included), and the sizes of its documents."""

    tokens: list[NDArray]
    sizes: list[NDArray[np.int64]]
    bad: list[BadLine]
    lines: int
    text_bytes: int
    end: Position
    disk_bytes: int


class BlockEncoder:
    """Encodes blocks. Checks one document of each against the tokenizer; raises EncoderMismatch where the ids differ."""

    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        self._tokenizer = build_tokenizer(job.tokenizer)
        self._encoder = make_encoder(job.encoder, self._tokenizer)

    def __call__(self, block: InputBlock) -> Encoded:
        texts, bad = extract_texts(block, self._job.keys)
        tokens, sizes = [], []
        for column in texts:
            ids, lengths = run_encoder(self._encoder, column)
            if self._encoder.name != REFERENCE and column:
                self._check(column, ids, lengths, block.first_line)
            ids, lengths = self._end_documents(ids, lengths)
            tokens.append(ids)
            sizes.append(lengths)
        content = block.content
        size = (
            len(content)
            if isinstance(content, bytes)
            else sum(len(text) for column in texts for text in column)
        )
        return Encoded(tokens, sizes, bad, block.lines, size, block.end, block.disk_bytes)

    def _check(self, texts: list[str], ids: NDArray, sizes: NDArray[np.int64], line: int) -> None:
        """One text, another one in each block; of texts that are all long, the beginning of one."""
        place = line * 2654435761 % len(texts)
        order = (*range(place, len(texts)), *range(place))
        short = next((i for i in order if len(texts[i]) <= _CHECKED_CHARS), None)
        if short is None:
            check_encoder(self._encoder, self._tokenizer, [texts[place][:_CHECKED_CHARS]])
            return
        end = int(sizes[: short + 1].sum())
        if len(sizes) != len(texts) or not np.array_equal(
            ids[end - sizes[short] : end], self._tokenizer.encode(texts[short])
        ):
            raise EncoderMismatch(
                self._encoder.name,
                f"its ids differ from the tokenizer's for the text {texts[short][:80]!r}",
            )

    def _end_documents(
        self, ids: NDArray, sizes: NDArray[np.int64]
    ) -> tuple[NDArray, NDArray[np.int64]]:
        """Drop documents without tokens, which the format's users cannot meet; append the end-of-document id to the others."""
        sizes = sizes[sizes > 0]
        if self._job.append_eod:
            ids = np.insert(ids, np.cumsum(sizes), self._tokenizer.eod)
            sizes = sizes + 1
        return ids.astype(self._job.dtype), sizes


def encode_blocks(
    job: EncodingJob, blocks: Iterable[InputBlock], workers: int
) -> Generator[Encoded, None, None]:
    """The blocks encoded, in order. One worker: in this process. Raises what encoding raises, DataError where a worker dies."""
    if workers == 1:
        yield from map(BlockEncoder(job), blocks)
        return
    pool = _Pool(job, workers)
    try:
        yield from pool.run(iter(blocks))
    finally:
        pool.close()


class _Pool:
    def __init__(self, job: EncodingJob, workers: int) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # fork would copy the threads' locks of three Rust libraries
        self._processes: dict[Connection, BaseProcess] = {}
        self._limit = 2 * workers + 1
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process

    def run(self, blocks: Iterator[InputBlock]) -> Iterator[Encoded]:
        idle = list(self._processes)
        busy: dict[Connection, tuple[int, InputBlock]] = {}
        done: dict[int, Encoded | BaseException] = {}
        following, due = next(blocks, None), 0
        submitted = 0
        while following is not None or busy:
            while following is not None and idle and submitted - due < self._limit:
                connection = idle.pop()
                busy[connection] = (submitted, following)
                self._send(connection, following)
                submitted += 1
                following = next(blocks, None)
            for connection in cast(list[Connection], wait(list(busy))):
                number, block = busy.pop(connection)
                done[number] = self._receive(connection, block)
                idle.append(connection)
            while due in done:
                result = done.pop(due)
                due += 1
                if isinstance(result, BaseException):
                    raise result
                yield result

    def close(self) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join()

    def _send(self, connection: Connection, block: InputBlock) -> None:
        try:
            connection.send(block)
        except OSError as error:
            raise self._make_death_error(connection, block) from error

    def _receive(self, connection: Connection, block: InputBlock) -> Encoded | BaseException:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise self._make_death_error(connection, block) from error

    def _make_death_error(self, connection: Connection, block: InputBlock) -> DataError:
        process = self._processes[connection]
        process.join(5)
        return DataError(
            f"worker process {process.pid} ended with exit code {process.exitcode} in {block.path}, lines {block.first_line} to "
            f"{block.end.line} (-9 is what a lack of memory looks like: use fewer --workers). "
            "The same command goes on from the last journal entry."
        )


def _serve(job: EncodingJob, connection: Connection) -> None:
    """A worker's life: until the parent closes the connection or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many already
    encode: BlockEncoder | None = None
    try:
        while True:
            block = connection.recv()
            try:
                encode = encode or BlockEncoder(job)
                result: Encoded | BaseException = encode(block)
            except (MegatronError, EncoderMismatch) as error:
                result = error
            except Exception:
                result = RuntimeError(
                    f"a worker failed in {block.path}, lines {block.first_line} to {block.end.line}:\n{traceback.format_exc()}"
                )
            connection.send(result)
    except (EOFError, OSError):
        return
