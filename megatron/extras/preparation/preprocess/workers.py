"""Encoding of blocks into token ids by several processes.

Invariants:

- Results come in the order of the blocks, whatever the number of workers.
- Memory holds no more than a few blocks for each worker.
- A worker holds one block at a time. Parent and worker can therefore never both wait in `send`.
- A worker ends when its parent ends, even by kill -9.
"""

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError, MegatronError
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.preprocess.encoders import (
    REFERENCE,
    EncoderMismatchError,
    check_encoder,
    make_encoder,
    run_encoder,
)
from megatron.extras.preparation.preprocess.inputs import (
    BadLine,
    InputBlock,
    Position,
    extract_texts,
    list_text_lines,
)
from megatron.extras.samples.stream.filters import SpecialTokenCounter
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.failures import TokenizerError

# The buffer grows by multiples of this.
_STEP = 8 << 20


class SharedBuffer:
    """A file without a name, in memory where the system can do so, that two processes map.

    A pipe holds a few hundred KB. The sender of a larger object waits until the receiver runs and
    reads, several times for each object, and both copy the bytes in pieces. In shared memory each
    side copies the bytes once, and does not wait for the other.

    Invariant: one side stores an object, and tells the other its size. Until the other side has
    loaded it, neither stores another one.
    """

    def __init__(self, descriptor: int) -> None:
        """Use an open file, whose descriptor is closed by `close`."""
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._end = 0

    def store(self, value: object) -> int:
        """Replace the content by an object, and return its size in bytes.

        Raises:
            OSError: the system has not enough memory.
        """
        self._end = 0
        # With this protocol, pickle passes large arrays and bytes to `write` without a copy.
        pickle.Pickler(self, protocol=5).dump(value)
        return self._end

    def write(self, data: Any) -> None:
        """Append bytes. It is called by pickle only."""
        with memoryview(data).cast("B") as view:
            start = self._end
            self._end += len(view)
            self._get_map(self._end)[start : self._end] = view

    def load(self, size: int) -> Any:
        """Return a copy of the object that the other process has stored."""
        with memoryview(self._get_map(size)) as view, view[:size] as part:
            return pickle.loads(part)

    def close(self) -> None:
        """Release the memory. The other process keeps it until it closes the file as well."""
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)

    def _get_map(self, size: int) -> mmap.mmap:
        """Return a mapping of at least `size` bytes. The file grows if it is smaller."""
        if self._map is None or len(self._map) < size:
            length = -(-size // _STEP) * _STEP
            # The other process may have made it larger.
            if os.fstat(self._descriptor).st_size < length:
                os.ftruncate(self._descriptor, length)
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._descriptor, length)
        return self._map


def create_memory_file() -> int:
    """Return the descriptor of a new file without a name.

    It is in memory on Linux. Other systems have no such file, so a temporary file is used there.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("preprocess")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# While a fast library is in use, only texts up to this length are encoded a second time.
_CHECKED_CHARS = 50_000


@dataclass(frozen=True)
class EncodingJob:
    """What a worker needs to know to encode blocks."""

    tokenizer: TokenizerConfig
    encoder: str
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str


@dataclass(frozen=True)
class Encoded:
    """One block, encoded.

    Attributes:
        tokens: For each key all ids end to end, with end-of-document ids.
        sizes: For each key the number of ids of each document.
        bad: The lines that gave no document.
        lines: Number of lines or rows.
        text_bytes: Size of the block's texts in UTF-8, whatever the format of its file.
        special_tokens: Special tokens that its texts spell.
        end: Where the next block begins.
        disk_bytes: How far into its file on disk the block reaches.
    """

    tokens: list[NDArray]
    sizes: list[NDArray[np.int64]]
    bad: list[BadLine]
    lines: int
    text_bytes: int
    special_tokens: int
    end: Position
    disk_bytes: int


class BlockEncoder:
    """Encodes blocks, and checks one document of each against the tokenizer."""

    def __init__(self, job: EncodingJob) -> None:
        """Load the tokenizer and the library that the job names.

        Raises:
            EncoderUnavailableError: the library cannot be used with this tokenizer.
        """
        self._job = job
        self._tokenizer = build_tokenizer(job.tokenizer)
        self._encoder = make_encoder(job.encoder, self._tokenizer)
        self._special_tokens = SpecialTokenCounter(self._tokenizer)

    def __call__(self, block: InputBlock) -> Encoded:
        """Return an encoded block.

        Raises:
            EncoderMismatchError: the library's ids differ from the tokenizer's, or it failed.
        """
        texts, bad = extract_texts(block, self._job.keys)
        try:
            encoded = [self._encode(column, block.first_line) for column in texts]
        except TokenizerError as error:
            # The library gave ids for a text that the tokenizer fails for.
            if self._encoder.name != REFERENCE:
                raise EncoderMismatchError(self._encoder.name, str(error)) from error
            texts, failing = self._leave_out_failing(texts, block)
            bad = sorted([*bad, *failing], key=lambda each: each.line)
            encoded = [self._encode(column, block.first_line) for column in texts]
        tokens = [ids for ids, _ in encoded]
        sizes = [lengths for _, lengths in encoded]
        # Bytes of text, so that the speed of a run does not depend on the format of its inputs.
        text_bytes = sum(len(text.encode("utf-8")) for column in texts for text in column)
        special = sum(map(self._special_tokens.count, texts))
        return Encoded(
            tokens, sizes, bad, block.lines, text_bytes, special, block.end, block.disk_bytes
        )

    def _encode(self, texts: list[str], line: int) -> tuple[NDArray, NDArray[np.int64]]:
        """Return the ids and the lengths of the texts of a key, see `Encoded`."""
        ids, lengths = run_encoder(self._encoder, texts)
        if self._encoder.name != REFERENCE and texts:
            self._check(texts, ids, lengths, line)
        return self._end_documents(ids, lengths)

    def _leave_out_failing(
        self, texts: list[list[str]], block: InputBlock
    ) -> tuple[list[list[str]], list[BadLine]]:
        """Return the texts for which the tokenizer does not fail, and the lines of the others."""
        kept = []
        bad = []
        lines = list_text_lines(block, self._job.keys)
        for line, *row in zip(lines, *texts, strict=True):
            try:
                for text in row:
                    self._tokenizer.encode(text)
                kept.append(row)
            except TokenizerError as error:
                bad.append(BadLine(block.path, line, str(error)))
        return [[row[key] for row in kept] for key in range(len(texts))], bad

    def _check(self, texts: list[str], ids: NDArray, sizes: NDArray[np.int64], line: int) -> None:
        """Check the ids of one text of a block.

        Each block checks another text. If all texts are long, the beginning of one is checked.
        """
        # The multiplier is Knuth's for hashing. It spreads the choice without a random generator,
        # so a run that is repeated checks the same texts.
        place = line * 2654435761 % len(texts)
        order = (*range(place, len(texts)), *range(place))
        short = next((i for i in order if len(texts[i]) <= _CHECKED_CHARS), None)
        if short is None:
            check_encoder(self._encoder, self._tokenizer, [texts[place][:_CHECKED_CHARS]])
            return
        end = int(sizes[: short + 1].sum())
        # `encode` would also compute the offsets of all tokens, which takes half as long again.
        (expected,) = self._tokenizer.encode_batch([texts[short]])
        if len(sizes) != len(texts) or not np.array_equal(ids[end - sizes[short] : end], expected):
            raise EncoderMismatchError(
                self._encoder.name,
                f"its ids differ from the tokenizer's for the text {texts[short][:80]!r}",
            )

    def _end_documents(
        self, ids: NDArray, sizes: NDArray[np.int64]
    ) -> tuple[NDArray, NDArray[np.int64]]:
        """Drop documents without tokens, and append the end-of-document id to the others.

        Readers of the format do not expect empty documents.
        """
        ids = ids.astype(self._job.dtype)
        sizes = sizes[sizes > 0]
        if self._job.append_eod:
            # The running sum gives the place after the last token of each document.
            ids = np.insert(ids, np.cumsum(sizes), self._tokenizer.eod)
            sizes = sizes + 1
        return ids, sizes


def encode_blocks(
    job: EncodingJob, blocks: Iterable[InputBlock], workers: int
) -> Generator[Encoded, None, None]:
    """Yield the encoded blocks in order. One worker means that this process encodes.

    Raises:
        EncoderMismatchError: a library gave wrong ids or failed.
        DataError: a worker process died.
    """
    if workers == 1:
        yield from map(BlockEncoder(job), blocks)
        return
    pool = _Pool(job, workers)
    try:
        yield from pool.run(iter(blocks))
    finally:
        pool.close()


class _Pool:
    """Worker processes, each with a pipe."""

    def __init__(self, job: EncodingJob, workers: int) -> None:
        """Start the workers."""
        # spawn, because a fork would copy the locks that threads of three Rust libraries may hold.
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        self._buffers: dict[Connection, SharedBuffer] = {}
        # Blocks that were submitted but not yielded. It bounds memory if one block takes very long.
        self._limit = 2 * workers + 1
        for _ in range(workers):
            own_end, worker_end = context.Pipe()
            memory = create_memory_file()
            self._buffers[own_end] = SharedBuffer(memory)
            process = context.Process(
                target=_serve, args=(job, worker_end, DupFd(memory)), daemon=True
            )
            # A worker needs nothing of the command, whose imports take long.
            with _without_main_module():
                process.start()
            # The worker's end must be closed here. Otherwise its death would not end our `recv`.
            worker_end.close()
            self._processes[own_end] = process

    def run(self, blocks: Iterator[InputBlock]) -> Iterator[Encoded]:
        """Yield the encoded blocks in order."""
        idle = list(self._processes)
        busy: dict[Connection, tuple[int, InputBlock]] = {}
        done: dict[int, Encoded | BaseException] = {}
        following = next(blocks, None)
        due = 0
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
            # Results may arrive in another order. Each waits in `done` until its number is due.
            while due in done:
                result = done.pop(due)
                due += 1
                if isinstance(result, BaseException):
                    raise result
                yield result

    def close(self) -> None:
        """Stop the workers, also in the middle of a block."""
        for connection, process in self._processes.items():
            connection.close()
            # A worker may be in the middle of a block whose result is not needed any more.
            process.terminate()
        for process in self._processes.values():
            process.join()
        for buffer in self._buffers.values():
            buffer.close()

    def _send(self, connection: Connection, block: InputBlock) -> None:
        """Send a block to a worker."""
        try:
            connection.send(self._buffers[connection].store(block))
        except OSError as error:
            raise self._make_death_error(connection, block) from error

    def _receive(self, connection: Connection, block: InputBlock) -> Encoded | BaseException:
        """Return the result of a worker. Errors in the worker are returned, not raised."""
        try:
            return self._buffers[connection].load(connection.recv())
        except (EOFError, OSError) as error:
            raise self._make_death_error(connection, block) from error

    def _make_death_error(self, connection: Connection, block: InputBlock) -> DataError:
        """Return the error for a worker that died."""
        # The exit code is known only after join. The pipe can close a little earlier.
        process = self._processes[connection]
        process.join(5)
        return DataError(
            f"worker process {process.pid} ended with exit code {process.exitcode} in "
            f"{block.path}, lines {block.first_line} to {block.end.line} (-9 usually means a lack "
            "of memory: use fewer --workers). The same command continues from the last journal "
            "entry."
        )


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the main module, which `multiprocessing` would otherwise import in each new process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(job: EncodingJob, connection: Connection, memory: Any) -> None:
    """Encode blocks in a worker process, until the parent closes the connection or ends."""
    # Ctrl-C reaches all processes of the terminal. The parent handles it and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This process is one of many. Threads of `tokenizers` would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encode: BlockEncoder | None = None
    buffer = SharedBuffer(memory.detach())
    try:
        while True:
            block = buffer.load(connection.recv())
            try:
                # Built with the first block, so that an error in it is sent to the parent.
                encode = encode or BlockEncoder(job)
                result: Encoded | BaseException = encode(block)
            except (MegatronError, EncoderMismatchError) as error:
                result = error
            # Any other error, because it must reach the parent with its traceback. If it ended this
            # process instead, the parent could report no more than the exit code.
            except Exception:
                result = RuntimeError(
                    f"a worker failed in {block.path}, lines {block.first_line} to "
                    f"{block.end.line}:\n{traceback.format_exc()}"
                )
            connection.send(buffer.store(result))
    except (EOFError, OSError):
        return
