"""A kind of data that the package does not have trains, evaluates and resumes.

CONTRIBUTING.md names its file as the example. Its choice takes the place of jsonl, because the
choices of --dataset-format are fixed.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from data.source_requests import make_request
from process_pool import Outcome, ProcessPool
from training.byte_text import ByteSource, ByteText
from training.runs import SIZES, Runner

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import DataConfig
from megatron.config.tree import Config
from megatron.data.source import BatchSlice
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.rules.finding import Finding, refuse_errors
from megatron.run.parts import NO_PARTS, Parts
from megatron.run.start.launch import read_launch

FLAGS = (
    "--vocab-size 256 --dataset-format jsonl --split 80,10,10 --eval-iters 1 --train-iters 5 "
    "--save-interval 3"
)


class ByteParts(Parts):
    """The core with another kind of data."""

    def find_missing(self, config: Config) -> Iterator[Finding]:
        yield from ()

    def load_source(self, dataset_format: str) -> ByteText:
        return ByteText()


def pretrain_bytes(argv: list[str]) -> None:
    """Run a command line on this rank with another kind of data."""
    import megatron.run.pretrain as pretrain_module

    pretrain_module.pretrain(read_launch(load_config(argv), ByteParts()))


class ByteRunner(Runner):
    """Train in a folder on the bytes of a file."""

    def outcomes(self, flags: str = "", ranks: int = 1) -> list[Outcome]:
        return self.pool.run(ranks, pretrain_bytes, self.argv(f"{FLAGS} {flags}"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = ["the", "cat", "sat", "on", "a", "mat"]
    path = tmp_path / "words.txt"
    path.write_text(" ".join(random.Random(1).choices(words, k=600)))
    return path


def test_a_new_kind_of_data_trains_and_resumes_with_other_ranks(
    pool: ProcessPool, text: Path, tmp_path: Path
) -> None:
    run = ByteRunner(pool, str(text), tmp_path / "run")
    other = ByteRunner(pool, str(text), tmp_path / "other")
    output = other()
    assert "training data     | bytes of words.txt" in output
    assert "validation loss at iteration 5" in output
    assert "test loss at iteration 5" in output
    losses = other.losses()
    assert losses[1] > 5
    assert losses[5] < losses[1]
    run("--exit-interval 3")
    resumed = run("--micro-batch-size 1", ranks=2)
    assert "iteration        4/" in resumed
    assert run.losses() == pytest.approx(losses, rel=1e-5)
    # The second launch must not go on with other data.
    text.write_text(text.read_text().replace("mat", "hat"))
    error = run.error("--train-iters 6")
    assert error.startswith("DataError: train: the checkpoint records {'words.txt': ")
    assert "leave out --datasets" in other.error("--datasets web")
    error = other.error("--split 0,100,0")
    assert error.startswith("DataError: --dataset-format jsonl leaves no sample for training in ")
    assert "words.txt, and the run needs 20 training samples. Give more data, or" in error


def test_mock_data_refuse_the_checkpoint_of_a_new_kind(
    pool: ProcessPool, text: Path, tmp_path: Path
) -> None:
    run = ByteRunner(pool, str(text), tmp_path / "run")
    run("--train-iters 1")
    assert "was trained on bytes data" in run.error("--mock-data")


def test_a_format_without_its_package_is_refused() -> None:
    config = load_config(f"{SIZES} {FLAGS} --data-path words.txt".split()).config
    with pytest.raises(ConfigError, match=r"--dataset-format needs megatron\.extras\.samples"):
        refuse_errors(NO_PARTS.find_missing(config))
    refuse_errors(ByteParts().find_missing(config))


def test_kernels_without_their_package_are_refused() -> None:
    config = load_config(f"{SIZES} --bias-swiglu-fusion --data-path words.txt".split()).config
    with pytest.raises(
        ConfigError, match=r"--bias-swiglu-fusion needs megatron\.extras\.step\.kernels"
    ):
        refuse_errors(NO_PARTS.find_missing(config))


def test_state_continues_only_with_the_same_bytes(text: Path) -> None:
    def open_bytes() -> ByteSource:
        data = DataConfig(data_path=(str(text),), num_workers=0)
        request = make_request(data, 40, seq_length=8, batch_slice=BatchSlice(1, vocab_size=256))
        return ByteSource("train", text, range(40), request)

    source = open_bytes()
    source.advance(3)
    state = source.state()
    assert state["consumed_samples"] == 3
    expected = source.read_batch(1)[0].tokens
    same = open_bytes()
    same.load(state)
    assert same.read_batch(1)[0].tokens.equal(expected)
    assert same.describe_place(3, 2) == "train: token 2 of sample 3"
    text.write_text(text.read_text().upper())
    other = open_bytes()
    with pytest.raises(DataError) as refused:
        other.load(state)
    assert str(refused.value) == (
        f"train: the checkpoint records {state['fingerprints']}, and the data now are "
        f"{other.fingerprints}. Resume with the data of the checkpoint, or start a new run from "
        "its weights with --finetune and another --save."
    )
    with pytest.raises(DataError, match="was trained on real data, and not on bytes data"):
        other.load({**state, "kind": "real"})
    assert other.state()["consumed_samples"] == 0
