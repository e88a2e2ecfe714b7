"""Tokenizers that are named on the Hub, with a local server and the official client."""

import importlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from operations.hub_fixtures import environment, hub
from operations.hub_server import TOKEN, HubServer
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import EOD, GPT2, ROOT, command

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer.build import HFTokenizer, build_tokenizer
from megatron.tokenizer.hub import find_tokenizer_folder, is_hub_name
from megatron.tokenizer.vocabulary import (
    compute_tokenizer_digests,
    fetch_missing_tokenizer,
    find_vocab_size,
)

constants = importlib.import_module("huggingface_hub.constants")
__all__ = ["hub"]
REPO = "org/tokenizer"
TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2"
)
CONFIG = TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=REPO)


@pytest.fixture
def published(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Publish a tokenizer beside other files, and return the files. The cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(GPT2)
    assert isinstance(tokenizer, HFTokenizer)
    files = {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}',
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer.py": b"raise SystemExit('code was run')",
        "model.safetensors": bytes(1000),
    }
    hub.create(REPO)
    hub.add(REPO, files)
    return files


def test_a_name_is_fetched_once_and_without_code(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "some text"
    assert find_tokenizer_folder(REPO) is None
    assert compute_tokenizer_digests(CONFIG) == {}, "nothing is downloaded to compare files"
    assert hub.requests == []
    assert build_tokenizer(CONFIG).encode(text) == build_tokenizer(GPT2).encode(text)
    folder = find_tokenizer_folder(REPO)
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == published.keys() - {
        "tokenizer.py",
        "model.safetensors",
    }
    assert hub.count("resolve") == 3
    hub.requests.clear()
    # The next run needs no network.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert build_tokenizer(CONFIG).vocab_size == 5000
    assert find_vocab_size(CONFIG) == (5000, None)
    assert hub.requests == []


def test_a_folder_comes_before_a_name(
    hub: HubServer, published: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / REPO
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(published[name])
    assert build_tokenizer(CONFIG).vocab_size == 5000
    assert hub.requests == []


def test_a_download_that_was_interrupted_is_not_used(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary comes last, so a folder without it is incomplete."""
    hub.fail("resolve", status=404, times=100)
    with pytest.raises(ConfigError, match="cannot be downloaded from the Hub"):
        build_tokenizer(CONFIG)
    hub.faults.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_tokenizer_folder(REPO) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert build_tokenizer(CONFIG).vocab_size == 5000


def test_a_download_is_bounded(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.tokenizer.hub.INDEX_BYTES", 1000)
    with pytest.raises(ConfigError, match="the Hub sends more than 1,000 bytes"):
        build_tokenizer(CONFIG)


def test_what_the_hub_refuses_is_explained(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="neither a folder on this machine nor a repository"):
        build_tokenizer(
            TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path="org/other")
        )
    hub.create("org/empty")
    with pytest.raises(ConfigError, match="has none of tokenizer"):
        build_tokenizer(
            TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path="org/empty")
        )
    hub.fail("info", status=403, headers={"X-Error-Code": "GatedRepo"})
    with pytest.raises(ConfigError, match="Accept the terms"):
        build_tokenizer(CONFIG)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="Correct HF_TOKEN") as refused:
        build_tokenizer(CONFIG)
    assert "hf_wrong" not in str(refused.value)


def test_without_a_network_the_message_names_the_download(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"hf download {REPO} tokenizer.json") as refused:
        build_tokenizer(CONFIG)
    assert TOKEN not in str(refused.value)
    assert hub.requests == []


def test_a_known_size_needs_no_download(hub: HubServer, published: dict[str, bytes]) -> None:
    stated = TokenizerConfig(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=REPO, vocab_size=5000
    )
    fetch_missing_tokenizer(stated, needs_text=False)
    assert hub.requests == []
    fetch_missing_tokenizer(stated, needs_text=True)
    assert hub.count("resolve") == 3


def pretrain_with_hub(argv: list[str], url: str, cache: str) -> None:
    """Run a command line on this rank with another Hub."""
    changes: dict[str, Any] = {
        "ENDPOINT": url,
        "HF_HUB_CACHE": cache,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
    }
    with (
        mock.patch.multiple(importlib.import_module("huggingface_hub.constants"), **changes),
        mock.patch.dict(os.environ, {"HF_TOKEN": TOKEN}),
    ):
        pretrain(argv)


def test_one_of_several_ranks_fetches(
    hub: HubServer, published: dict[str, bytes], pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    flags = (
        f"{TINY} --eod-mask-loss --train-iters 1 --lr 1e-3 --eval-iters 0 --data-path {corpus} "
        f"--data-cache-path {tmp_path}/index --save {tmp_path}/run "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {REPO}"
    )
    hub.fail("info", status=404, headers={"X-Error-Code": "RepoNotFound"})
    cache = str(tmp_path / "ranks")
    for outcome in pool.run(2, pretrain_with_hub, flags.split(), hub.url, cache):
        assert outcome.kind == "ConfigError", outcome.output
        assert "nor a repository of the Hub" in str(outcome.error)
    hub.requests.clear()
    succeed(pool.run(2, pretrain_with_hub, flags.split(), hub.url, cache))
    assert hub.count("info") == 1
    assert hub.count("resolve") == 3
    # The name is kept in the checkpoint, and not a folder of the cache.
    config = open_checkpoint(tmp_path / "run", 1).read_config()
    assert config.tokenizer.tokenizer_name_or_path == REPO


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("org/name-1.0_x", True),
        ("/data/tok", False),
        ("./tok", False),
        ("../tok", False),
        ("a/b/c", False),
        ("https://huggingface.co/gpt2", False),
        ("org/", False),
        ("", False),
    ],
)
def test_names_of_the_hub_are_recognised(name: str, expected: bool) -> None:
    assert is_hub_name(name) is expected


def test_preprocessing_fetches_a_name(
    hub: HubServer, published: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool runs in a process of its own, with the environment variables that users set."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a short text"}) + "\n")
    for name, value in environment(hub, tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    process = command(
        *(ROOT / "tools" / "preprocess_data.py", "--input", tmp_path / "in.jsonl"),
        *("--output-prefix", tmp_path / "made", "--append-eod", "--workers", "1"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", REPO),
    )
    output = "".join(process.communicate())
    assert process.returncode == 0, output
    assert TOKEN not in output
    made = IndexedDataset(str(tmp_path / "made_text_document"))
    assert made.get(0).tolist() == [*build_tokenizer(GPT2).encode("a short text"), EOD]
    assert hub.count("resolve") == 3
