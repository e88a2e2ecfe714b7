"""Tokenizers: their ids, what they must not add to a text, and errors in their files.

The ids are compared with those of the reference and of transformers.
"""

import base64
import builtins
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import EOD, GPT2, MERGES, VOCAB
from tokenizers import AddedToken, processors

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer.build import TransformersTokenizer, build_tokenizer, list_special_token_ids
from megatron.tokenizer.failures import describe_tiktoken

TINY = build_tokenizer(GPT2)


def folder_with(path: Path, *, eos: object = "<|endoftext|>") -> Path:
    """Write a Hugging Face tokenizer folder of the tiny BPE.

    Its post-processor adds BOS and EOS, as Llama's does. It also asks for truncation and padding.
    """
    backend = build_tokenizer(GPT2).backend  # type: ignore[attr-defined]
    backend.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<|endoftext|>", special=True)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 5000), ("<|endoftext|>", EOD)]
    )
    backend.enable_truncation(16)
    backend.enable_padding(length=64)
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path


def hf(path: Path | str, **changes: object) -> TokenizerConfig:
    """Return the configuration of a Hugging Face tokenizer."""
    return TokenizerConfig(
        tokenizer_type="PretrainedFromHF",
        tokenizer_name_or_path=str(path),
        **changes,  # type: ignore[arg-type]
    )


def test_gpt2_gives_the_ids_of_the_reference() -> None:
    tokenizer = build_tokenizer(GPT2)
    reference = IndexedDataset(tiny_corpus.REFERENCE_PREFIX)
    assert tokenizer.vocab_size == 5000
    assert tokenizer.eod == EOD
    for number, ids in enumerate(tokenizer.encode_batch(tiny_corpus.texts())):
        np.testing.assert_array_equal([*ids, EOD], reference.get(number))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_gpt2_decodes_what_it_encoded(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text


def test_gpt2_encodes_special_tokens_in_a_text_as_text() -> None:
    tokenizer = build_tokenizer(GPT2)
    assert EOD not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([64, EOD]) == "a<|endoftext|>"


def test_hf_adds_no_tokens_and_does_not_truncate(tmp_path: Path) -> None:
    """The file asks for BOS, EOS, truncation and padding. The ids have none of these."""
    tokenizer = build_tokenizer(hf(folder_with(tmp_path / "tok")))
    text = tiny_corpus.texts()[0]
    expected = TINY.encode(text)
    assert len(expected) > 64
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_batch([text]) == [expected]
    assert tokenizer.encode("x") == TINY.encode("x")
    assert tokenizer.eod == EOD
    assert tokenizer.vocab_size == 5001
    assert list_special_token_ids(tokenizer) == (EOD, 5000)


def test_hf_reads_the_file_itself_and_both_forms_of_eos(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tok", eos={"content": "<s>"})
    assert build_tokenizer(hf(folder / "tokenizer.json")).eod == 5000
    (folder / "tokenizer_config.json").unlink()
    assert build_tokenizer(hf(folder)).eod == EOD, "GPT-2's token is found by its usual name"
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    assert build_tokenizer(hf(folder)).eod == 5000


def test_hf_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    for in_text in (False, True):
        ours = build_tokenizer(hf(folder, special_tokens_in_text=in_text))
        for text in [*tiny_corpus.texts()[:10], "a <s> b<|endoftext|>"]:
            expected = theirs.encode(
                text, add_special_tokens=False, split_special_tokens=not in_text
            )
            assert ours.encode(text) == expected
            assert ours.encode_batch([text]) == [expected]


def test_a_special_token_in_a_text_needs_a_tokenizer_that_has_them() -> None:
    with pytest.raises(ConfigError, match="--special-tokens-in-text is not possible with GPT2"):
        build_tokenizer(replace(GPT2, special_tokens_in_text=True))


def write_tiktoken_files(folder: Path) -> tuple[Path, Path]:
    """Write look-alikes of qwen.tiktoken and of tekken.json, each in a folder of its own."""
    codes = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
    ranks = folder / "qwen" / "qwen.tiktoken"
    tekken = folder / "mistral" / "tekken.json"
    for path in (ranks, tekken):
        path.parent.mkdir()
    ranks.write_text("".join(f"{code} {rank}\n" for rank, code in enumerate(codes)))
    vocabulary = [{"rank": rank, "token_bytes": code} for rank, code in enumerate(codes)]
    special = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(["<unk>", "<s>", "</s>"])
    ]
    sizes = {"num_vocab_tokens": 256, "default_vocab_size": 259, "default_num_special_tokens": 3}
    content = {"config": {"pattern": r"\S+|\s+", **sizes}, "vocab": vocabulary}
    tekken.write_text(json.dumps({**content, "special_tokens": special}))
    return ranks, tekken


def test_a_file_of_tiktoken_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    for path in write_tiktoken_files(tmp_path):
        for kind in ("PretrainedFromHF", "SentencePieceTokenizer", "GPT2BPETokenizer"):
            for name in (path, path.parent):
                config = TokenizerConfig(tokenizer_type=kind, tokenizer_name_or_path=str(name))
                # transformers reads a folder with a tekken.json, if an eos_token is named.
                with pytest.raises(ConfigError, match="is a file of tiktoken") as refused:
                    build_tokenizer(config)
                assert 'python -c "from transformers.' in str(refused.value)
                assert str(path) in str(refused.value)


def test_the_commands_that_convert_files_of_tiktoken_work(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tiktoken")
    for path in write_tiktoken_files(tmp_path):
        found = re.search(r'python -c "(.*?)",', describe_tiktoken(path) or "")
        assert found is not None
        command = found[1].replace("PATTERN", repr(r"\S+|\s+")).replace("TOKENS", "'<|endoftext|>'")
        exec(command, {})
        end = "</s>" if path.name == "tekken.json" else "<|endoftext|>"
        (path.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        first = 3 if path.name == "tekken.json" else 0
        tokenizer = build_tokenizer(hf(path.parent))
        assert tokenizer.encode("é a") == [first + byte for byte in "é a".encode()]
        assert tokenizer.eod == (2 if first else 256)


def slow_folder(path: Path, **config: object) -> Path:
    """Write a tokenizer without tokenizer.json. It is CTRL's, which exists in Python only."""
    path.mkdir()
    (path / "vocab.json").write_text('{"<unk>": 0, "a": 1, "b": 2, "c": 3}')
    (path / "merges.txt").write_text("#version: 0.2\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CTRLTokenizer", **config})
    )
    return path


def test_without_tokenizer_json_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = build_tokenizer(hf(slow_folder(tmp_path / "tok", eos_token="<unk>")))
    assert isinstance(tokenizer, TransformersTokenizer)
    assert tokenizer.eod == 0
    assert tokenizer.encode("a b") == [1, 2]
    assert tokenizer.encode_batch(["b", "c"]) == [[2], [3]]
    # The end of a document is a special token of this tokenizer.
    config = hf(tmp_path / "tok", special_tokens_in_text=True)
    assert build_tokenizer(config).encode("a <unk>") == [1, 0]
    assert tokenizer.decode([1, 2]) == "a b"
    assert tokenizer.vocab_size >= 4
    assert 0 in list_special_token_ids(tokenizer)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_folder_of_a_model_without_a_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no vocabulary"):
        build_tokenizer(hf(tmp_path))


def test_without_tokenizer_json_an_eos_token_is_required(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="no end-of-document token; name an eos_token"):
        build_tokenizer(hf(slow_folder(tmp_path / "tok")))


def test_missing_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install transformers"):
        build_tokenizer(hf(tmp_path))


def test_errors_name_flag_and_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    cases: list[tuple[TokenizerConfig, str]] = [
        (TokenizerConfig(merge_file=MERGES), "GPT2BPETokenizer needs --vocab-file"),
        (TokenizerConfig(vocab_file=VOCAB), "GPT2BPETokenizer needs --merge-file"),
        (
            TokenizerConfig(vocab_file=VOCAB, merge_file="no.txt"),
            r"--merge-file no.txt does not exist",
        ),
        (
            TokenizerConfig(vocab_file=str(broken), merge_file=MERGES),
            r"--vocab-file .*broken.json cannot be read as JSON",
        ),
        (
            TokenizerConfig(vocab_file=VOCAB, merge_file=MERGES, vocab_size=300),
            r"--vocab-size 300 is smaller than .* 5000",
        ),
        (
            TokenizerConfig(tokenizer_type="PretrainedFromHF"),
            "PretrainedFromHF needs --tokenizer-name-or-path",
        ),
        (hf(broken), "broken.json cannot be read as a Hugging Face tokenizer"),
        (hf("./nowhere"), r"--tokenizer-name-or-path ./nowhere does not exist"),
        # These could be names on the Hub, but are those of files.
        (hf("folder/tokenzer.json"), "folder/tokenzer.json does not exist"),
        (
            replace(hf("sp/tokenzer.model"), tokenizer_type="SentencePieceTokenizer"),
            "sp/tokenzer.model does not exist",
        ),
        (
            TokenizerConfig(tokenizer_name_or_path="sp/tokenizer.model"),
            "add --tokenizer-type SentencePieceTokenizer to use sp/tokenizer.model",
        ),
        (
            TokenizerConfig(tokenizer_name_or_path="folder"),
            "add --tokenizer-type PretrainedFromHF to use folder",
        ),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=message):
            build_tokenizer(config)


def drop_token(token: str) -> dict[str, int]:
    """Return the tiny vocabulary without a token."""
    vocabulary = json.loads(Path(VOCAB).read_bytes())
    del vocabulary[token]
    return vocabulary


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "must be a JSON object; it is list"),
        ({"a": "b"}, "must be a JSON object of token: id"),
        (drop_token("a"), "lacks 1 of the 256 byte symbols (a ...)"),
        (drop_token("<|endoftext|>"), "has no <|endoftext|>"),
        (drop_token("he"), "are not a valid BPE"),
    ],
    ids=["list", "text ids", "no byte a", "no end of document", "no token of a merge"],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, content: object, message: str) -> None:
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as raised:
        build_tokenizer(TokenizerConfig(vocab_file=str(file), merge_file=MERGES))
    assert message in str(raised.value)


def test_a_vocabulary_that_is_given_as_the_merges_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--merge-file is merges\.txt, not the vocabulary"):
        build_tokenizer(TokenizerConfig(vocab_file=VOCAB, merge_file=VOCAB))


def test_hf_with_an_unknown_end_of_document_token_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tok", eos="</s>")
    with pytest.raises(ConfigError, match="no end-of-document token") as raised:
        build_tokenizer(hf(folder))
    assert "'</s>'" in str(raised.value)
