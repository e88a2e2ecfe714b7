"""A tokenizer.json that is hostile or damaged is an error with a message, and takes no time."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_corpus import MERGES, VOCAB

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.extras.interop.convert.tokenizer_files import write_tokenizer
from megatron.tokenizer.build import build_tokenizer

END = {
    "id": 0,
    "content": "<|endoftext|>",
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


def make_config(folder: Path, normalizer: Any = None, **model: Any) -> TokenizerConfig:
    """Write a tokenizer.json, and return the flags that name it."""
    content = {
        "version": "1.0",
        "added_tokens": [END],
        "normalizer": normalizer,
        "model": {
            "type": "BPE",
            "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3},
            "merges": [["a", "b"]],
            **model,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return TokenizerConfig(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder), vocab_size=None
    )


def replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def test_merges_that_let_the_library_panic(tmp_path: Path) -> None:
    config = make_config(tmp_path, continuing_subword_prefix="####")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        build_tokenizer(config)


def test_ids_that_no_embedding_has(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "c": 4_000_000_000}
    with pytest.raises(ConfigError, match="has the id 4000000000"):
        build_tokenizer(make_config(tmp_path, vocab=vocab))


def test_normalizer_that_makes_texts_long(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"type": "Sequence", "normalizers": [replace("a" * 10)] * 9}
    prepend = {"type": "Prepend", "prepend": "a" * 2000}
    in_list = {"type": "Sequence", "normalizers": [nested]}
    for normalizer in (nested, in_list, replace("a" * 2000), prepend):
        with pytest.raises(ConfigError, match=r"may make texts .* times as long"):
            build_tokenizer(make_config(tmp_path, normalizer))
    usual = [{"type": "NFC"}, replace("\u2581", " "), {"type": "Prepend", "prepend": "\u2581"}]
    tokenizer = build_tokenizer(make_config(tmp_path, {"type": "Sequence", "normalizers": usual}))
    assert tokenizer.encode("ab") == [3]


@pytest.mark.parametrize("token", [["a"], {}, {"content": {}}, 5])
def test_end_of_document_that_is_no_text(tmp_path: Path, token: Any) -> None:
    config = make_config(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token is .* be a text"):
        build_tokenizer(config)


def test_export_to_a_full_disk(tmp_path: Path) -> None:
    """The library's own writer raises an Exception, which gave a traceback."""
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(VOCAB), merge_file=str(MERGES)
    )
    ids = build_tokenizer(config).encode("ab")
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(out, config, 1 << 20, print)
    written = out / "tokenizer.json"
    assert tokenizers.Tokenizer.from_file(str(written)).encode("ab").ids == ids
    written.unlink()
    written.symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:
        write_tokenizer(out, config, 1 << 20, print)
    assert failed.value.errno == errno.ENOSPC
