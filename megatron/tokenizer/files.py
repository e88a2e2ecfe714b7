"""What makes a tokenizer: the files that its ids come from, digested, so that another one of the
same size is found.

Invariant: content counts, and no path does; a tokenizer may be moved.
"""

from pathlib import Path

import xxhash

from megatron.config.data import TokenizerConfig
from megatron.tokenizer.build import end_token, find_tokenizer_json

_TRANSFORMERS_FILES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "added_tokens.json",
)
"""Of a folder without tokenizer.json: those that its ids come from."""


def tokenizer_files(config: TokenizerConfig) -> dict[str, Path]:
    """Return the files that the ids come from, as far as they are on this machine: the part they
    play -> path."""
    if config.tokenizer_type == "GPT2BPETokenizer":
        given = {"--vocab-file": config.vocab_file, "--merge-file": config.merge_file}
        found = {part: Path(name) for part, name in given.items() if name is not None}
    else:
        name = config.tokenizer_name_or_path
        file = find_tokenizer_json(name)
        if file is not None:
            found = {"tokenizer.json": file}
        else:
            found = (
                {part: Path(name) / part for part in _TRANSFORMERS_FILES}
                if name is not None
                else {}
            )
    return {part: path for part, path in found.items() if path.is_file()}


def tokenizer_digests(config: TokenizerConfig) -> dict[str, str]:
    """Return the part that a file plays -> xxh3_128 of its content; of a Hugging Face folder also
    its end-of-document token.

    Empty where no file is given or none is on this machine.

    Raises:
        ConfigError: a file that names the end of a document cannot be read. OSError: another one
            cannot be read.
    """
    files = tokenizer_files(config)
    digests = {
        part: str(xxhash.xxh3_128_hexdigest(path.read_bytes())) for part, path in files.items()
    }
    if files and config.tokenizer_type != "GPT2BPETokenizer":
        token = end_token(next(iter(files.values())).parent)
        if token is not None:
            digests["end-of-document token"] = str(token)
    return digests
