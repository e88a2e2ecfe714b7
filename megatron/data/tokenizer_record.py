"""The tokenizer that made a data set, recorded in PREFIX.tokenizer.json.

Ids of another tokenizer with the same vocabulary size are valid, so training on them would not
fail. The record is what reveals such data.

Invariant: a record is ignored unless the sizes of `.bin` and `.idx` are those that it names. Data
without a record are not checked.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import load_bytes, parse_json
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import get_bin_path, get_idx_path, is_manifest
from megatron.tokenizer.vocabulary import (
    compute_digest_of_ids,
    compute_tokenizer_digests,
    find_tokenizer_files,
)

_IDS = "ids of all tokens"
"""Part that does not depend on the format of the files."""
_SHOWN = 5
"""Number of data sets that a message names."""


def get_record_path(prefix: str | os.PathLike) -> Path:
    """Return the path of the file that names the tokenizer. A manifest does that itself."""
    if is_manifest(prefix):
        return Path(prefix)
    return Path(f"{os.fspath(prefix)}.tokenizer.json")


def describe_tokenizer(config: TokenizerConfig) -> dict[str, dict[str, str]]:
    """Return the name and the digest of each part of a tokenizer. Most parts are files.

    It is empty if no file is given or none is on this machine.

    Raises:
        ConfigError: a file cannot be read.
    """
    digests = compute_tokenizer_digests(config)
    names = {part: path.name for part, path in find_tokenizer_files(config).items()}
    # A part without a file, such as the end-of-document token, has no name.
    parts = {
        part: {"name": names.get(part, ""), "digest": digest} for part, digest in digests.items()
    }
    table = compute_digest_of_ids(config)
    if parts and table is not None:
        parts[_IDS] = {"name": "", "digest": table}
    return parts


def write_record(prefix: str, tokenizer: dict[str, dict[str, str]] | None) -> None:
    """Record the tokenizer of a finished data set, or remove an old record if it is not known.

    Raises:
        OSError: the file cannot be written.
    """
    if not tokenizer:
        get_record_path(prefix).unlink(missing_ok=True)
        return
    content = {"bytes": _measure(prefix), "tokenizer": tokenizer}
    replace_file(get_record_path(prefix), json.dumps(content, indent=1) + "\n")


def read_record(prefix: str) -> dict[str, dict[str, str]] | None:
    """Return the tokenizer of a data set as `describe_tokenizer` does, or None if it is not known.

    Raises:
        DataError: the record cannot be read.
    """
    path = get_record_path(prefix)
    fix = "delete it if the data set is right"
    if is_manifest(prefix):
        fix = "make the corpus again with the same command of preprocess_data.py"
    try:
        text = load_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; correct it, or {fix}") from error
    return _parse_record(prefix, path, text, fix)


def _parse_record(
    prefix: str, path: Path, text: bytes, fix: str
) -> dict[str, dict[str, str]] | None:
    """Return the tokenizer that a record names. See `read_record`. `fix` is for the message."""
    try:
        content: dict[str, Any] = parse_json(text)
        tokenizer = {
            part: {"name": str(file["name"]), "digest": str(file["digest"])}
            for part, file in content["tokenizer"].items()
        }
        sizes = content.get("bytes")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged; {fix}") from error
    try:
        # With other sizes, another data set has replaced the recorded one. Those that a manifest
        # records are compared when it is opened.
        if is_manifest(prefix) or sizes == _measure(prefix):
            return tokenizer
    except OSError:
        # A missing file is reported when the data set is opened.
        pass
    return None


def check_tokenizers_of_data(config: TokenizerConfig, prefixes: Iterable[str]) -> None:
    """Check that no data set was made with another tokenizer than that of the run.

    Only parts that both have are compared. Nothing is compared if the files of the tokenizer are
    not given.

    Raises:
        ConfigError: data were made with another tokenizer, or a file of it cannot be read.
        DataError: a record cannot be read.
    """
    found = ((prefix, read_record(prefix)) for prefix in prefixes)
    records = [(prefix, record) for prefix, record in found if record]
    if not records:
        return
    here = describe_tokenizer(config)
    problems = []
    for prefix, record in records:
        differing = compare_tokenizers(record, here)
        if differing:
            problems.append(f"{prefix}: {'; '.join(differing)}")
    if not problems:
        return
    more = []
    if len(problems) > _SHOWN:
        more.append(f"... and {len(problems) - _SHOWN} more")
    raise ConfigError(
        "the data were made with another tokenizer than the one that is given (xxh3_128 of the "
        "files):\n  "
        + "\n  ".join([*problems[:_SHOWN], *more])
        + "\nGive the tokenizer that made the data, or preprocess the text again. If both give the "
        "same ids, delete the PREFIX.tokenizer.json of these data"
    )


def compare_tokenizers(
    there: dict[str, dict[str, str]], here: dict[str, dict[str, str]]
) -> list[str]:
    """Return a description of each part that both have with different digests."""
    common = there.keys() & here.keys()
    # The table of ids is compared only if the files have another format. It depends on added
    # tokens, which ordinary text does not have.
    if common != {_IDS}:
        common -= {_IDS}
    # A part without a name would leave two spaces.
    return [
        f"{part} {there[part]['name']} {there[part]['digest']}, and "
        f"{here[part]['name']} {here[part]['digest']} here".replace("  ", " ")
        for part in there
        if part in common and there[part]["digest"] != here[part]["digest"]
    ]


def _measure(prefix: str) -> list[int]:
    """Return the sizes of both files of a data set in bytes."""
    return [path(prefix).stat().st_size for path in (get_bin_path, get_idx_path)]
