"""Tokenizers against the reference's ids and against transformers, what they must not add, and what is wrong with their files."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import EOD, GPT2, MERGES, VOCAB
from tokenizers import AddedToken, processors

from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.errors import ConfigError
from megatron.tokenizer import TransformersTokenizer, build_tokenizer, list_special_token_ids

TINY = build_tokenizer(GPT2)


def folder_with(path: Path, *, eos: object = "<|endoftext|>") -> Path:
    """A Hugging Face tokenizer folder around the tiny BPE, with BOS and EOS added by its post-processor, as Llama's has."""
    backend = build_tokenizer(GPT2).backend  # type: ignore[attr-defined]
    backend.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<|endoftext|>", special=True)]
    )
    ends = [("<s>", 5000), ("<|endoftext|>", EOD)]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=ends
    )
    backend.enable_truncation(16)
    backend.enable_padding(length=64)
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path


def hf(path: Path | str | None, **changes: object) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=path and str(path), **changes
    )  # type: ignore[arg-type]


def test_gpt2_gives_the_ids_of_the_reference() -> None:
    tokenizer, reference = build_tokenizer(GPT2), IndexedDataset(tiny_corpus.REFERENCE_PREFIX)
    assert (tokenizer.vocab_size, tokenizer.eod) == (5000, EOD)
    for number, ids in enumerate(tokenizer.encode_batch(tiny_corpus.texts())):
        np.testing.assert_array_equal([*ids, EOD], reference.get(number))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_gpt2_decodes_what_it_encoded(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text


def test_gpt2_takes_special_tokens_in_a_text_for_text() -> None:
    tokenizer = build_tokenizer(GPT2)
    assert EOD not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([64, EOD]) == "a<|endoftext|>"


def test_hf_adds_nothing_and_cuts_nothing(tmp_path: Path) -> None:
    """A post-processor that adds BOS and EOS, truncation and padding: all in the file, none in the ids."""
    tokenizer = build_tokenizer(hf(folder_with(tmp_path / "tok")))
    text = tiny_corpus.texts()[0]
    assert len(tokenizer.encode(text)) > 64
    assert (
        tokenizer.encode(text)
        == tokenizer.encode_batch([text])[0]
        == build_tokenizer(GPT2).encode(text)
    )
    assert (tokenizer.eod, tokenizer.vocab_size) == (EOD, 5001)
    assert list_special_token_ids(tokenizer) == (EOD, 5000)
    assert tokenizer.encode("x") == build_tokenizer(GPT2).encode("x")


def test_hf_takes_the_file_itself_and_both_forms_of_eos(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tok", eos={"content": "<s>"})
    assert build_tokenizer(hf(folder / "tokenizer.json")).eod == 5000
    (folder / "tokenizer_config.json").unlink()
    assert build_tokenizer(hf(folder)).eod == EOD  # by its usual name
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    assert build_tokenizer(hf(folder)).eod == 5000


def test_hf_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = build_tokenizer(hf(folder))
    for text in [*tiny_corpus.texts()[:10], "a <s> b<|endoftext|>"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def slow_folder(path: Path, **config: object) -> Path:
    """A tokenizer without tokenizer.json: CTRL's, which exists in pure Python only."""
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
    assert (tokenizer.eod, tokenizer.encode("a b"), tokenizer.encode_batch(["b", "c"])) == (
        0,
        [1, 2],
        [[2], [3]],
    )
    assert tokenizer.decode([1, 2]) == "a b"
    assert tokenizer.vocab_size >= 4
    assert 0 in list_special_token_ids(tokenizer)


def test_without_tokenizer_json_and_eos_there_is_no_end_of_document(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"no end-of-document token; name an eos_token"):
        build_tokenizer(hf(slow_folder(tmp_path / "tok")))


def test_missing_transformers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError,
        match=r"--tokenizer-name-or-path .* needs the package transformers: pip install transformers",
    ):
        build_tokenizer(hf(tmp_path))


def test_a_name_is_not_looked_up_on_the_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        ConfigError,
        match=r"--tokenizer-name-or-path no/such-tokenizer cannot be read: .*nothing is downloaded",
    ):
        build_tokenizer(hf("no/such-tokenizer"))


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
        (hf(None), "PretrainedFromHF needs --tokenizer-name-or-path"),
        (
            hf(broken),
            r"--tokenizer-name-or-path: .*broken.json cannot be read as a Hugging Face tokenizer",
        ),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=message):
            build_tokenizer(config)


def test_damaged_vocabularies(tmp_path: Path) -> None:
    vocabulary = json.loads(Path(VOCAB).read_bytes())

    def message(content: object, merges: str = MERGES) -> str:
        file = tmp_path / "vocab.json"
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError) as error:
            build_tokenizer(TokenizerConfig(vocab_file=str(file), merge_file=merges))
        return str(error.value)

    assert "must be a JSON object; it is list" in message([1])
    assert "must be a JSON object of token: id" in message({"a": "b"})
    assert "lacks 1 of the 256 byte symbols (a ...)" in message(
        {k: v for k, v in vocabulary.items() if k != "a"}
    )
    assert "has no <|endoftext|>" in message({k: v for k, v in vocabulary.items() if v != EOD})
    assert "do not make a BPE" in message({k: v for k, v in vocabulary.items() if k != "he"})


def test_hf_without_end_of_document(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tok", eos="</s>")
    with pytest.raises(
        ConfigError, match=r"no end-of-document token \('</s>' is what its files name\)"
    ):
        build_tokenizer(hf(folder))
