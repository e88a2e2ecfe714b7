"""The input files of a corpus, here or at a URL, and one shard from each, written atomically.

Invariant: a record PREFIX.shard.json appears after the files that it describes. Two processes may
make the same shard at once, because each writes into a folder of its own, and both write the same
bytes.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from megatron.base.durable import sync_folder, write_file
from megatron.base.errors import ConfigError, DataError, MegatronError
from megatron.base.outside_file import load_json
from megatron.base.plain_text import format_count, has_secret, is_url, redact
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDatasetWriter, choose_dtype
from megatron.data.tokenizer_record import describe_tokenizer, get_record_path, write_record
from megatron.extras.preparation.corpus.manifest import Shard, compute_sha256, list_files
from megatron.extras.preparation.preprocess.encoders import (
    EncoderMismatchError,
    choose_encoder,
    sample_texts,
)
from megatron.extras.preparation.preprocess.input_files import FOLDER_SUFFIXES, expand_inputs
from megatron.extras.preparation.preprocess.inputs import read_blocks
from megatron.extras.preparation.preprocess.workers import BlockEncoder, EncodingJob
from megatron.extras.samples.stream.filters import SpecialTokenCounter
from megatron.extras.samples.stream.remote import (
    BlockCache,
    FileStatus,
    RemoteDataFile,
    RemoteFolder,
)
from megatron.tokenizer.build import build_tokenizer

_COPY_BYTES = 1 << 24
_STEM_BYTES = 100
"""Part of a file's name that is in the name of its shard. Names have at most 255 bytes."""


@dataclass(frozen=True)
class InputFile:
    """An input file as it was listed."""

    path: str
    """Absolute path, or URL."""
    size: int
    version: int
    """Time of the last change in ns. For a URL, see `FileStatus`."""

    def __str__(self) -> str:
        """Return the path without secrets of a URL."""
        return redact(self.path)

    @property
    def has_secret(self) -> bool:
        """Whether the path is a URL with a user, a password or a query."""
        return is_url(self.path) and has_secret(self.path)

    @property
    def label(self) -> str:
        """A name without secrets that no other input file has."""
        return f"{self} (shard {self.shard_name})" if self.has_secret else str(self)

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the file in the record of its shard, without secrets."""
        return {**asdict(self), "path": str(self)}

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(_cut_query(self.path)).name

    @property
    def shard_name(self) -> str:
        """Name of the shard. It depends on the path alone, so files may be added to a corpus."""
        # A path on this machine may have bytes that are not UTF-8.
        digest = hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).hexdigest()
        stem = self.file_name.partition(".")[0].encode("utf-8", "replace")[:_STEM_BYTES]
        return f"{stem.decode('utf-8', 'ignore')}-{digest[:16]}"

    def fetch(self, folder: Path, log: Callable[[str], None]) -> str:
        """Return the path of the file on this machine. A file at a URL is copied into `folder`.

        Raises:
            DataError: The file cannot be read, or has changed since it was listed.
        """
        if not is_url(self.path):
            self.check_unchanged(log)
            return self.path
        remote = _open_folder(self.path, log)
        status = self._describe(remote)
        target = folder / self.file_name
        with RemoteDataFile(remote, status).open() as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        # The parts of the copy would otherwise be of two different contents.
        self._describe(remote)
        return str(target)

    def check_unchanged(self, log: Callable[[str], None]) -> None:
        """Check that a file on this machine is as it was listed.

        Raises:
            DataError: It has changed.
        """
        self._compare(list_inputs([self.path], log)[0])

    def _describe(self, remote: RemoteFolder) -> FileStatus:
        """Return the status of a file at a URL, and check that it is as it was listed."""
        status = remote.describe("")
        self._compare(InputFile(self.path, status.size, status.version))
        return status

    def _compare(self, found: "InputFile") -> None:
        if found != self:
            raise DataError(f"{self} has changed since it was listed. Run the same command again.")


def list_inputs(patterns: Sequence[str], log: Callable[[str], None]) -> list[InputFile]:
    """Return the input files of files, globs, folders and URLs, in the order of the output.

    The files of a folder, a glob or a URL are sorted by name.

    Raises:
        ConfigError: A pattern matches no file.
        DataError: A folder cannot be listed.
    """
    found = list[InputFile]()
    for pattern in patterns:
        if is_url(pattern):
            folder = _open_folder(pattern, log)
            # A signed URL of a file ends with its query and not with the suffix.
            if "?" in pattern and _cut_query(pattern).lower().endswith(FOLDER_SUFFIXES):
                files = [folder.describe("")]
            else:
                files = sorted(folder.list_files(FOLDER_SUFFIXES), key=lambda status: status.name)
            if not files:
                raise ConfigError(
                    f"--input {redact(pattern)} has no file with one of the suffixes "
                    f"{' '.join(FOLDER_SUFFIXES)}."
                )
            found += [InputFile(folder.get_url(s.name), s.size, s.version) for s in files]
            continue
        for path in expand_inputs([pattern], log):
            facts = os.stat(path)
            found.append(InputFile(os.path.abspath(path), facts.st_size, facts.st_mtime_ns))
    return found


def _open_folder(url: str, log: Callable[[str], None]) -> RemoteFolder:
    """Return the folder or file at a URL. Nothing is cached, because each file is read once."""
    return RemoteFolder(url, BlockCache(str(Path()), 0, log), log)


def _cut_query(path: str) -> str:
    """Return a URL without its query. A question mark may be part of a name on this machine."""
    return path.partition("?")[0] if is_url(path) else path


SCRATCH = ".new-"
"""Prefix of the folders in which shards are written."""
_LISTED = 1000
"""Largest number of bad documents of a file that are described. All are counted."""


@dataclass(frozen=True)
class CorpusJob:
    """What to make of each input file."""

    folder: str
    """Folder of the shards. All tasks must see it under this path."""
    key: str
    """Key (column) of the text in a record."""
    append_eod: bool
    on_bad_line: Literal["stop", "skip"]
    tokenizer: TokenizerConfig

    @property
    def made_with(self) -> dict[str, Any]:
        """The settings on which the bytes of a shard depend, as JSON values."""
        return {
            "json_key": self.key,
            "append_eod": self.append_eod,
            "on_bad_line": self.on_bad_line,
            "tokenizer": describe_tokenizer(self.tokenizer),
            "special_tokens_in_text": self.tokenizer.special_tokens_in_text,
        }

    def get_prefix(self, source: InputFile) -> str:
        """Return the path of the shard of an input file."""
        return f"{self.folder}/{source.shard_name}_{self.key}_document"

    def get_path(self, source: InputFile) -> str:
        """Return the path of the shard of an input file, below the folder of the manifest."""
        return str(Path(*Path(self.get_prefix(source)).parts[-2:]))

    def get_record(self, source: InputFile) -> Path:
        """Return the path of a file's record, which has the finished shard or the failure."""
        return Path(f"{self.get_prefix(source)}.shard.json")

    def find_result(self, source: InputFile, made_with: dict[str, Any]) -> Shard | str | None:
        """Return the shard of a file, why the file failed, or None if neither is recorded.

        A record counts if the file, the settings, the tokenizer and the sizes are still the same.
        """
        try:
            record = load_json(self.get_record(source))
            if list_changes(record["made_with"], made_with) or record["input"] != source.facts:
                return None
            if record["failure"] is not None:
                return str(record["failure"])
            # The folder may have been renamed since.
            path = self.get_path(source)
            shard = replace(Shard.from_json(record["shard"]), path=path)
            sizes = tuple(file.stat().st_size for file in list_files(self.get_prefix(source)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # A record that is damaged counts as missing, and the shard is made again.
            return None
        return shard if sizes == shard.bytes else None


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of the settings that may give a finished shard other bytes.

    With --on-bad-line stop, a file with a bad line gives no shard. So all shards that were made
    with it are the same with skip, but not the other way round.

    Args:
        before: `CorpusJob.made_with` of the shard.
        now: That of this job.
    """
    # Older records lack what was off.
    changed = [name for name in now if before.get(name, False) != now[name]]
    stopped = before.get("on_bad_line") == "stop"
    return [name for name in changed if name != "on_bad_line" or not stopped]


class ShardMaker:
    """Makes shards. It loads the tokenizer once."""

    def __init__(self, job: CorpusJob, log: Callable[[str], None]) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: The tokenizer cannot be loaded.
        """
        self._job = job
        self._log = log
        self._tokenizer = build_tokenizer(job.tokenizer)
        self._made_with = job.made_with
        self._dtype = choose_dtype(self._tokenizer.vocab_size)
        self._rejected: tuple[str, ...] = ()
        self._encode: BlockEncoder | None = None

    def make(self, source: InputFile) -> None:
        """Make the shard of a file, or record why that fails. A complete shard is kept.

        Raises:
            OSError: The folder of the shards cannot be written.
        """
        found = self._job.find_result(source, self._made_with)
        if isinstance(found, Shard):
            files = list_files(self._job.get_prefix(source))
            if tuple(map(compute_sha256, files)) == found.sha256:
                self._log(f"{source}: the shard is complete")
                return
            self._log(f"warning: {source}: the shard has changed and is made again")
        record = self._job.get_record(source)
        record.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=self._job.folder, prefix=SCRATCH) as scratch:
            content: dict[str, Any] = {"made_with": self._made_with, "input": source.facts}
            try:
                shard = self._write(source, Path(scratch))
                content |= {"failure": None, "shard": asdict(shard)}
                self._log(
                    f"{source}: {format_count(shard.documents, 'document')}, "
                    f"{format_count(shard.tokens, 'token')}, "
                    f"{format_count(shard.bad_documents, 'bad document')}"
                )
            # Any of these errors concerns this file only, so the other files are still made.
            except (MegatronError, ArithmeticError, ValueError, LookupError, TypeError) as error:
                # The message may name a temporary copy, which will not exist any more.
                reason = f"{type(error).__name__}: {error}".replace(f"{scratch}/", "")
                content |= {"failure": reason}
                self._log(f"ERROR: {source} failed: {reason}")
            write_file(Path(scratch, record.name), json.dumps(content, indent=1) + "\n")
            if content["failure"] is None:
                prefix = self._job.get_prefix(source)
                names = [*list_files(prefix)]
                # It is not written if the files of the tokenizer are not known.
                if self._made_with["tokenizer"]:
                    names.insert(0, get_record_path(prefix))
                for file in names:
                    os.replace(Path(scratch, file.name), file)
            sync_folder(record.parent)
            os.replace(Path(scratch, record.name), record)
            sync_folder(record.parent)

    def _write(self, source: InputFile, scratch: Path) -> Shard:
        """Write the shard of a file into a folder.

        Raises:
            DataError: The file cannot be read, or has a bad line and --on-bad-line is stop.
        """
        path = source.fetch(scratch, self._log)
        while True:
            try:
                shard = self._encode_file(source, path, scratch)
                if path == source.path:
                    source.check_unchanged(self._log)
                return shard
            except EncoderMismatchError as error:
                self._log(f"WARNING: encoder {error.name} cannot be trusted: {error.reason}")
                self._rejected += (error.name,)
                self._encode = None

    def _encode_file(self, source: InputFile, path: str, scratch: Path) -> Shard:
        """Encode a local file. See `_write`."""
        job = self._job
        keys = (job.key,)
        if self._encode is None:
            name = choose_encoder(
                self._tokenizer, sample_texts([path], keys), self._rejected, self._log
            )
            encoding = EncodingJob(job.tokenizer, name, keys, job.append_eod, self._dtype.name)
            self._encode = BlockEncoder(encoding)
        final = job.get_prefix(source)
        prefix = str(scratch / Path(final).name)
        bad = list[str]()
        number_bad = 0
        text_bytes = special_tokens = 0
        with IndexedDatasetWriter(prefix, self._dtype) as writer:
            for encoded in map(self._encode, read_blocks([path], keys)):
                for line in encoded.bad:
                    if job.on_bad_line == "stop":
                        raise DataError(
                            f"line {line.line}: {line.reason}. Correct the file and run the same "
                            "command again, or add --on-bad-line skip, which leaves such lines out."
                        )
                    if len(bad) < _LISTED:
                        bad.append(f"line {line.line}: {line.reason}")
                        self._log(f"bad document left out: {source}: {bad[-1]}")
                number_bad += len(encoded.bad)
                text_bytes += encoded.text_bytes
                special_tokens += encoded.special_tokens
                writer.add_documents(encoded.tokens[0], encoded.sizes[0])
            # A wrong key would otherwise give an empty shard. A file without lines may be empty.
            if number_bad and not writer.num_documents:
                raise DataError(
                    f"none of its documents is usable, such as {bad[0]}. Correct --input or "
                    "--json-keys."
                )
        if special_tokens:
            counter = SpecialTokenCounter(self._tokenizer)
            self._log(f"{source}: {counter.describe(special_tokens)}")
        write_record(prefix, self._made_with["tokenizer"])
        files = list_files(prefix)
        return Shard(
            path=job.get_path(source),
            input=str(source),
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            bytes=(files[0].stat().st_size, files[1].stat().st_size),
            sha256=(compute_sha256(files[0]), compute_sha256(files[1])),
            text_bytes=text_bytes,
            bad_documents=number_bad,
            first_bad_documents=tuple(bad),
        )
