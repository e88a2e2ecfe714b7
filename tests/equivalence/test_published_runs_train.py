"""Tests that the command lines of tr1-13B, tr8-104B and tr11-176B train, save and resume.

Only sizes, paths and backend are changed. Eight processes run TP 2 x PP 2 x DP 2 or TP 2 x PP 4.
The rest is that of the published runs: DeepSpeed, fp16 with a dynamic loss scale or bf16 at ZeRO
stage 0, a ramp-up of the batch size, recomputation, dropout, a norm of the embedding, ALiBi, and
stages that a regular expression determines.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from config.minimal import PUBLISHED_RUNS, published_arguments, replace_values
from equivalence.corpus import curve, load_from
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite

# `importorskip` would import the package, which takes long, while tests are collected.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
SIZES = {
    "--tensor-model-parallel-size": ["2"],
    "--num-layers": ["4"],
    "--hidden-size": ["64"],
    "--ffn-hidden-size": ["256"],
    "--num-attention-heads": ["4"],
    "--seq-length": ["32"],
    "--max-position-embeddings": ["32"],
    # 4 batches of 4 samples, 2 of 8, then of 12. In the short suite two of 4, and two of 8.
    "--rampup-batch-size": ["4", "4", by_suite("8", "24")],
    "--global-batch-size": [by_suite("8", "12")],
    "--train-samples": [by_suite("24", "96")],
    "--lr-decay-samples": [by_suite("22", "90")],
    "--lr-warmup-samples": [by_suite("4", "8")],
    "--lr": ["1e-2"],  # for a model of this width
    "--save-interval": [by_suite("2", "5")],
    "--log-interval": ["1"],
    "--pad-vocab-size-to": ["5120"],
}
STEPS, SAVED = by_suite((4, 2), (10, 5))
BACKEND = {"--distributed-backend": ["gloo"]}


def paths(folder: Path, data: Path, config: str) -> dict[str, list[str]]:
    def own(name: str) -> list[str]:
        return [str(folder / name)]

    prefix = str(TINY / "meg-gpt2-openwebtext_text_document")
    (data / "train-splits.txt").write_text(f'"train: 0.6 0:0.9 {prefix}, 0.4 0:0.9 {prefix}"')
    (data / "valid-splits.txt").write_text(f'"all: 1 0.9:1 {prefix}" "again: 1 0.9:1 {prefix}"')
    return {
        "--vocab-file": [str(TINY / "gpt2-tiny-vocab.json")],
        "--merge-file": [str(TINY / "gpt2-tiny-merges.txt")],
        "--tokenizer-name-or-path": [str(write_hf_tokenizer(data))],
        "--data-path": [prefix],
        "--train-weighted-split-paths-path": [str(data / "train-splits.txt")],
        "--valid-weighted-split-paths-path": [str(data / "valid-splits.txt")],
        "--save": own("checkpoints"),
        "--load": own("checkpoints"),
        "--tensorboard-dir": own("tensorboard"),
        "--codecarbon-dir": own("codecarbon"),
        "--kill-switch-path": own("kill-switch"),
        "--deepspeed_config": [config],
    }


def write_hf_tokenizer(folder: Path) -> Path:
    """Write the tiny vocabulary as a tokenizer folder of Hugging Face, and return its path."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = str(TINY / "gpt2-tiny-vocab.json")
    merges = str(TINY / "gpt2-tiny-merges.txt")
    backend = Tokenizer(models.BPE.from_file(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    return path


def arguments(run: str, stages: int, folder: Path, data: Path) -> list[str]:
    """Return the published command line with the values above and `stages` pipeline stages."""
    published = published_arguments(run, data)
    config = data / "ds_config.json"
    content = json.loads(config.read_text())
    config.write_text(
        json.dumps(content | {"train_batch_size": int(SIZES["--global-batch-size"][0])})
    )
    changed = (
        SIZES
        | {"--pipeline-model-parallel-size": [str(stages)]}
        | BACKEND
        | paths(folder, data, str(config))
    )
    return [*replace_values(published, changed), "--data-cache-path", str(data / "cache")]


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        pytest.param(
            run, stages, marks=() if (run, stages) == ("tr8-104B", 2) else pytest.mark.full
        )
        for run in PUBLISHED_RUNS
        for stages in (2, 4)
    ],
)
def test_a_published_command_line_trains_saves_and_resumes(
    run: str, stages: int, pool: ProcessPool, tmp_path: Path
) -> None:
    if run == "tr11-176B-ml":
        pytest.importorskip("transformers", reason="transformers is not installed")
    whole = tmp_path / "whole" / "checkpoints"
    output = succeed(pool.run(8, pretrain, arguments(run, stages, whole.parent, tmp_path)))
    assert "PipelineEngine" in output
    assert "DeepSpeed" in output
    losses = curve(whole)
    assert len(losses) == STEPS
    assert losses[-1][0] < losses[0][0] - by_suite(0.005, 0.02)
    rest = tmp_path / "rest" / "checkpoints"
    resumed = load_from(arguments(run, stages, rest.parent, tmp_path), whole, SAVED)
    assert f"at iteration {SAVED}" in succeed(pool.run(8, pretrain, resumed))
    assert curve(rest) == losses[SAVED:]
    assert (rest / f"global_step{STEPS}").is_dir()
