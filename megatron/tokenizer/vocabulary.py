"""The size of the vocabulary, as the tokenizer has it and padded as the model has it.

Also the number of bytes of text that each id stands for, and the files that the ids come from with
their digests. The digests show whether a tokenizer of the same size is another one. They depend on
contents and not on paths, because a tokenizer may be moved.

Invariant: the padded size is divisible by the tensor-parallel size and never smaller than the
vocabulary.

Source: padding rule of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3).
"""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import assert_never

import xxhash

from megatron.base.code_version import PACKAGE
from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, load_bytes, load_text
from megatron.config.data import TokenizerConfig
from megatron.tokenizer.build import (
    HFTokenizer,
    Tokenizer,
    build_tokenizer,
    find_sentencepiece_model,
    find_tokenizer_json,
    list_special_token_ids,
    read_end_token,
    read_tokenizer_json,
    read_vocabulary,
)
from megatron.tokenizer.hub import fetch_tokenizer, find_tokenizer_folder, is_hub_name
from megatron.tokenizer.sentencepiece_model import (
    FILE,
    is_sentencepiece_installed,
    read_sentencepiece,
)

GPT2_VOCAB_SIZE = 50257
"""Size of GPT-2's vocabulary: 50,000 merges, 256 bytes and the end of a document."""

_WITHOUT_NAME = re.compile(r"tokenizer|original|hf|snapshots|[0-9a-f]{40}")
"""Parts of a path that do not name a tokenizer, so the folder above may."""

_NEEDED_FLAGS = {
    "PretrainedFromHF": "--tokenizer-name-or-path with the folder of a tokenizer.json",
    "SentencePieceTokenizer": "--tokenizer-model with the file tokenizer.model",
}


def compute_padded_vocab_size(
    vocab_size: int,
    make_divisible_by: int = 128,
    tensor_model_parallel_size: int = 1,
    pad_to: int | None = None,
) -> int:
    """Return the rows of the word embedding.

    They are the next multiple of make_divisible_by x tensor-parallel size, or exactly `pad_to`. As
    in Megatron-DeepSpeed, `pad_to` must be divisible by make_divisible_by, but not by its product
    with the tensor-parallel size. Equal parts for the ranks are enough.

    Raises:
        ConfigError: `pad_to` is smaller than the vocabulary or not divisible, or a size is below 1.
    """
    if vocab_size < 1 or make_divisible_by < 1:
        raise ConfigError(
            f"vocabulary size {vocab_size} and --make-vocab-size-divisible-by {make_divisible_by} "
            "must both be at least 1."
        )
    if pad_to is None:
        multiple = make_divisible_by * tensor_model_parallel_size
        # -(-a // b) is the division rounded up, in exact integers.
        return -(-vocab_size // multiple) * multiple
    _check_padding(vocab_size, make_divisible_by, tensor_model_parallel_size, pad_to)
    return pad_to


def _check_padding(
    vocab_size: int, make_divisible_by: int, tensor_model_parallel_size: int, pad_to: int
) -> None:
    """Check --pad-vocab-size-to. See `compute_padded_vocab_size`."""
    if pad_to < vocab_size:
        raise ConfigError(
            f"--pad-vocab-size-to {pad_to} must not be smaller than the vocabulary, {vocab_size}. "
            "Raise it, or leave it out."
        )
    # This is the smallest step that satisfies both rules. The messages suggest a multiple of it.
    multiple = math.lcm(make_divisible_by, tensor_model_parallel_size)
    fitting = -(-pad_to // multiple) * multiple
    if pad_to % make_divisible_by:
        raise ConfigError(
            f"--pad-vocab-size-to {pad_to} must be divisible by --make-vocab-size-divisible-by "
            f"{make_divisible_by}. Use {fitting}, or a --make-vocab-size-divisible-by that "
            "divides it."
        )
    if pad_to % tensor_model_parallel_size:
        raise ConfigError(
            f"--pad-vocab-size-to {pad_to} must be divisible by --tensor-model-parallel-size "
            f"{tensor_model_parallel_size}. Use {fitting}."
        )


def describe_lack(config: TokenizerConfig) -> str:
    """Return the error for a type without the path of its files."""
    return (
        f"--tokenizer-type {config.tokenizer_type} needs {_NEEDED_FLAGS[config.tokenizer_type]}, "
        "or --vocab-size N if no tokenizer is needed."
    )


def describe_absence(config: TokenizerConfig) -> str:
    """Return the error for a tokenizer that is not on this machine."""
    flag = "--tokenizer-name-or-path"
    if config.tokenizer_type == "SentencePieceTokenizer":
        flag = "the file --tokenizer-model"
    absent = f"{flag} {config.tokenizer_name_or_path} does not exist on this machine"
    if config.vocab_size is not None:
        return f"{absent}. Correct the path, or leave it out, if no tokenizer is needed."
    return (
        f"{absent}, so the size of the vocabulary is not known. Correct the path, or give "
        "--vocab-size N."
    )


def fetch_missing_tokenizer(config: TokenizerConfig, *, needs_text: bool) -> None:
    """Download a tokenizer that is named on the Hub, if it is needed and not on this machine.

    One rank calls it before the others read the tokenizer.

    Args:
        config: Settings of the tokenizer.
        needs_text: Whether the tokenizer is needed even if --vocab-size is given.

    Raises:
        ConfigError: The Hub cannot be reached, or it has no such tokenizer.
    """
    name = config.tokenizer_name_or_path
    if config.has_two_files or name is None or not is_hub_name(name):
        return
    if needs_text or config.vocab_size is None:
        fetch_tokenizer(name)


def find_vocab_size(config: TokenizerConfig) -> tuple[int, str | None]:
    """Return the number of token ids for planning, and a warning if it had to be guessed.

    Only local files are opened. The first of these that is known is used: --vocab-size, the
    tokenizer's files, --pad-vocab-size-to as an upper bound, the published size. A run is refused
    if the size had to be guessed (`check_tokenizer_files`).

    Raises:
        ConfigError: No tokenizer is named, files that exist cannot be read, or no size is known.
    """
    if config.vocab_size is not None:
        if config.vocab_size < 1:
            raise ConfigError(f"--vocab-size {config.vocab_size} must be at least 1.")
        return config.vocab_size, None
    size = count_token_ids(config)
    if size is not None:
        return size, None
    return _assume_vocab_size(config)


def _assume_vocab_size(config: TokenizerConfig) -> tuple[int, str]:
    """Return the number of ids of a tokenizer that is not on this machine, and a warning.

    Raises:
        ConfigError: No size is known.
    """
    if config.has_two_files:
        absent = "no --vocab-file was given"
        if config.vocab_file:
            absent = f"--vocab-file {config.vocab_file} does not exist"
        return (
            GPT2_VOCAB_SIZE,
            f"{absent}: assuming GPT-2's vocabulary of {GPT2_VOCAB_SIZE}; give --vocab-size N for "
            "another size.",
        )
    if config.pad_vocab_size_to is not None:
        return config.pad_vocab_size_to, (
            f"the tokenizer {config.tokenizer_name_or_path} is not on this machine: using "
            f"--pad-vocab-size-to {config.pad_vocab_size_to} as the size of its vocabulary, "
            "which is an upper bound."
        )
    if config.tokenizer_name_or_path is None:
        raise ConfigError(describe_lack(config))
    absent = f"the tokenizer {config.tokenizer_name_or_path} is not on this machine"
    published = find_published_size(config.tokenizer_name_or_path)
    if published is not None:
        return published[0], (
            f"{absent}: assuming its published vocabulary of {published[0]} ({published[1]}); give "
            "--vocab-size N for another size."
        )
    # A model with a wrong vocabulary may have a third fewer parameters.
    raise ConfigError(describe_absence(config))


def find_published_size(name: str) -> tuple[int, str] | None:
    """Return the number of ids of a public tokenizer and its source, or None for another name.

    The name is the last part of a path, or that of the folder of a file tokenizer.model. It is for
    planning only.
    """
    parts = re.sub(r"\.(json|model)(?=/|$)", "", name.lower()).split("/")
    named = [part for part in parts if part and not _WITHOUT_NAME.fullmatch(part)]
    # The cache of the Hub has folders such as models--meta-llama--Llama-3.1-8B.
    last = "".join(named[-1:]).rpartition("--")[2]
    for row in tomllib.loads(load_text(PACKAGE / "tokenizer/published.toml"))["tokenizers"]:
        if re.fullmatch(row["names"], last):
            return row["ids"], row["source"]
    return None


def count_token_ids(config: TokenizerConfig) -> int | None:
    """Return the number of ids in the tokenizer's files, or None if they are not on this machine.

    The largest id counts and not the number of entries, because ids may have gaps.

    Raises:
        ConfigError: Files that exist cannot be read.
    """
    match config.tokenizer_type:
        case "GPT2BPETokenizer":
            if config.vocab_file is not None and Path(config.vocab_file).is_file():
                return 1 + max(read_vocabulary(config.vocab_file).values())
            return None
        case "SentencePieceTokenizer":
            if find_sentencepiece_model(config.tokenizer_name_or_path) is None:
                return None
            return build_tokenizer(config).vocab_size
        case "PretrainedFromHF":
            found = find_tokenizer_json(config.tokenizer_name_or_path)
            if found is not None:
                vocabulary = read_tokenizer_json(found).get_vocab(with_added_tokens=True)
                return 1 + max(vocabulary.values())
            if find_tokenizer_folder(config.tokenizer_name_or_path) is not None:
                # Without tokenizer.json only `transformers` can count the ids, which is slower.
                return build_tokenizer(config).vocab_size
            return None
        case _:
            assert_never(config.tokenizer_type)


def check_same_vocab_size(config: TokenizerConfig, described: str) -> None:
    """Check that the tokenizer has as many ids as `config.vocab_size`.

    Args:
        config: Settings of the tokenizer. If its files are not on this machine, its published size
            is compared. Nothing is checked if that is not known either.
        described: The size with its flag and origin, for the message.

    Raises:
        ConfigError: The numbers differ, or files that exist cannot be read.
    """
    size = count_token_ids(config)
    if config.has_two_files:
        name = f"--vocab-file {config.vocab_file}"
    else:
        name = f"--tokenizer-name-or-path {config.tokenizer_name_or_path}"
        published = find_published_size(config.tokenizer_name_or_path or "")
        if size is None and published is not None:
            size = published[0]
            name += f", which is not on this machine, as published ({published[1]}),"
    if size is None or size == config.vocab_size:
        return
    padding = " --pad-vocab-size-to None"
    if config.pad_vocab_size_to is None:
        padding = ""
    raise ConfigError(
        f"{name} has {size} ids, which is not {described}. Give the model's own tokenizer, or "
        f"--vocab-size {size}{padding} to train this architecture with this one."
    )


_SPACE = "\u2581"
"""What stands for a space in the tokens of SentencePiece."""


def count_token_bytes(tokenizer: Tokenizer) -> list[int] | None:
    """Return the bytes in UTF-8 of each id, or None if the kind of tokenizer does not give them.

    The sum over the ids of a text is the length of the text for byte-level tokenizers. For those
    of the kind of SentencePiece, it is one more if they put a space before a text. Special tokens
    are no text and have 0 bytes.
    """
    if not isinstance(tokenizer, HFTokenizer) or tokenizer.backend.decoder is None:
        return None
    kinds = _list_decoders(json.loads(tokenizer.backend.decoder.__getstate__()))
    counts = [0] * tokenizer.vocab_size
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if index in added:
            # Added tokens stand for themselves, whatever the others are spelled with.
            counts[index] = len(token.encode())
        elif "ByteLevel" in kinds:
            # Each byte is spelled with one letter of an alphabet of 256.
            counts[index] = len(token)
        elif kinds & {"Metaspace", "ByteFallback"}:
            counts[index] = _count_sentencepiece_bytes(token)
        else:
            return None
    for index in list_special_token_ids(tokenizer):
        counts[index] = 0
    return counts


def _list_decoders(record: dict) -> set[str]:
    """Return the kinds of a decoder and of the decoders in it."""
    kinds = {str(record.get("type"))}
    for part in record.get("decoders", []):
        kinds |= _list_decoders(part)
    return kinds


def _count_sentencepiece_bytes(token: str) -> int:
    # With byte fallback, a byte that is in no other token is spelled <0x0A>.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(_SPACE, " ").encode())


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
