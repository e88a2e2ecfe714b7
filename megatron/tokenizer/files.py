"""The files that a tokenizer's ids come from, and their digests.

The digests show whether a tokenizer of the same size is another one.

Invariant: the digests depend on contents and not on paths. A tokenizer may be moved.
"""

import json
from pathlib import Path
from typing import assert_never

import xxhash

from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, load_bytes
from megatron.config.data import TokenizerConfig
from megatron.tokenizer.build import (
    find_sentencepiece_model,
    find_tokenizer_json,
    read_end_token,
    read_tokenizer_json,
    read_vocabulary,
)
from megatron.tokenizer.hub import find_tokenizer_folder
from megatron.tokenizer.sentencepiece_model import (
    FILE,
    is_sentencepiece_installed,
    read_sentencepiece,
)

_TRANSFORMERS_FILES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "added_tokens.json",
)
"""Files that the ids come from, in a folder without tokenizer.json."""


def find_tokenizer_files(config: TokenizerConfig) -> dict[str, Path]:
    """Return the files that the ids come from, by the part that each plays.

    Files that are not on this machine are left out.
    """
    found: dict[str, Path] = {}
    match config.tokenizer_type:
        case "GPT2BPETokenizer":
            given = {"--vocab-file": config.vocab_file, "--merge-file": config.merge_file}
            found = {part: Path(name) for part, name in given.items() if name is not None}
        case "SentencePieceTokenizer":
            file = find_sentencepiece_model(config.tokenizer_name_or_path)
            if file is not None:
                found = {FILE: file}
        case "PretrainedFromHF":
            file = find_tokenizer_json(config.tokenizer_name_or_path)
            folder = find_tokenizer_folder(config.tokenizer_name_or_path)
            if file is not None:
                found = {"tokenizer.json": file}
            elif folder is not None:
                found = {part: folder / part for part in _TRANSFORMERS_FILES}
        case _:
            assert_never(config.tokenizer_type)
    return {part: path for part, path in found.items() if path.is_file()}


def compute_tokenizer_digests(config: TokenizerConfig) -> dict[str, str]:
    """Return the xxh3_128 of each file's content, by the part that the file plays.

    For a Hugging Face folder the end-of-document token is included. The result is empty if no file
    is given or none is on this machine.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = find_tokenizer_files(config)
    try:
        digests = {
            part: str(xxhash.xxh3_128_hexdigest(load_bytes(path, INDEX_BYTES)))
            for part, path in files.items()
        }
    except OSError as error:
        raise ConfigError(f"a file of the tokenizer cannot be read: {error}") from error
    # Two folders may have the same vocabulary and end documents with different tokens.
    if files and config.tokenizer_type == "PretrainedFromHF":
        # All of these files are in one folder, and the token is named by another file there.
        token = read_end_token(next(iter(files.values())).parent)
        if token is not None:
            digests["end-of-document token"] = str(token)
    return digests


def compute_digest_of_ids(config: TokenizerConfig) -> str | None:
    """Return the xxh3_128 of all tokens with their ids, in whatever files they are.

    None if no file is on this machine, if only `transformers` can read it, or if the package that
    reads it is not installed.

    Raises:
        ConfigError: a file is damaged.
    """
    files = find_tokenizer_files(config)
    if "--vocab-file" in files:
        ids = read_vocabulary(str(files["--vocab-file"]))
    elif "tokenizer.json" in files:
        ids = read_tokenizer_json(files["tokenizer.json"]).get_vocab(with_added_tokens=True)
    elif config.tokenizer_type == "SentencePieceTokenizer" and files:
        if not is_sentencepiece_installed():
            return None
        ids = read_sentencepiece(files[FILE]).get_vocab()
    else:
        return None
    return str(xxhash.xxh3_128_hexdigest(json.dumps(sorted(ids.items())).encode()))
