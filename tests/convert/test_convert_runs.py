"""Runs at TP 2 x PP 2 that are exported and imported again, and exports that are interrupted."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint
from megatron.model.inputs import Inputs
from megatron.observe.metrics import read_metrics

transformers = pytest.importorskip("transformers")
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 --lr 2e-2 --train-iters 4 "
    "--eval-iters 0 --init-method-std 0.2"
)
LLAMA = (
    "--num-query-groups 2 --ffn-hidden-size 48 --glu-activation swiglu --normalization RMSNorm "
    "--position-embedding-type rotary --no-add-bias-linear --untie-embeddings-and-output-weights"
)
BLOOM = "--position-embedding-type alibi --embed-layernorm"
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def train(pool: ProcessPool, corpus: str, folder: Path, flags: str, ranks: int) -> None:
    paths = (
        f"--data-path {corpus} --data-cache-path {folder}/cache --vocab-file {VOCAB} "
        f"--merge-file {MERGES} --save {folder}"
    )
    succeed(pool.run(ranks, pretrain, f"{SIZES} {paths} {flags}".split()))


def compute(model: Any, tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Return the loss of a model of `transformers`, and its gradients."""
    loss = torch.nn.functional.cross_entropy(
        model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("flags", [LLAMA, pytest.param(BLOOM, marks=pytest.mark.full), ""])
def test_a_trained_model_is_exported_and_imported(
    flags: str, pool: ProcessPool, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(pool, corpus, tmp_path / "run", f"{flags} {TP2_PP2}", 4)
    out = tmp_path / "exported"
    command = ["to-hf", "--load", str(tmp_path / "run"), "--out", str(out)]
    assert convert_checkpoint.main([*command, "--license", "apache-2.0"]) == 0
    assert "4 layers agree" in capsys.readouterr().out
    ours = load_model(open_checkpoint(tmp_path / "run", 4)).train()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "Another day, another batch of stories."
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :32]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    expected, gradients = compute(theirs, ids)
    logits = ours.compute_logits(ids)
    difference = (logits - theirs(ids).logits).abs().max() / logits.std()
    assert difference < 1e-4
    loss = ours(None, Inputs(ids[:, :-1], ids[:, 1:]))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    norms = [
        torch.stack([g.norm() for g in each if g is not None]).norm().item()
        for each in (gradients, [p.grad for p in ours.parameters()])
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    card = (out / "README.md").read_text()
    assert "- iteration: 4" in card
    assert f"- parameters: {sum(p.numel() for p in ours.parameters()):,}, in " in card
    assert f"- data: {Path(corpus).name}\n" in card
    assert str(corpus) not in card
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["lm_loss"]
    assert f"- loss on training data: {last:.4f}\n" in card
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\nlicense: apache-2.0\n---\n" in card
    assert "same most likely token in 100.00 %" in card
    # The imported weights are those that were exported, and train at any layout.
    imported = tmp_path / "imported"
    assert convert_checkpoint.main(["from-hf", "--model", str(out), "--out", str(imported)]) == 0
    # The imported run has a copy of the tokenizer.
    out.rename(tmp_path / "moved")
    out = tmp_path / "moved"
    back = dict(load_model(open_checkpoint(imported, 0)).named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, back[name]), name
    config = imported / "global_step0" / "config.yaml"
    model = open_checkpoint(imported, 0).read_config().model
    # The run's, and not the default of GPT-2's class.
    assert (model.hidden_dropout, model.attention_dropout) == (0, 0)
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 1, "all files can be read by the same users"
    losses = []
    for ranks, layout in ((1, ""), (2, "--tensor-model-parallel-size 2")):
        again = tmp_path / f"again{ranks}"
        flags_of_run = (
            f"--config {config} --load {imported} --finetune --save {again} --data-path {corpus} "
            f"--data-cache-path {again}/cache --train-iters 2 --lr 1e-3 --eval-iters 0 "
            f"--global-batch-size 4 --micro-batch-size 2 --seq-length 32 --hidden-dropout 0 "
            f"--attention-dropout 0 --log-interval 1 {layout}"
        )
        succeed(pool.run(ranks, pretrain, flags_of_run.split()))
        losses.append([entry["lm_loss"] for entry in read_metrics(again / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # The trained weights have a lower loss than new ones, which is at least log(vocabulary).
    assert losses[0][0] < 8.5


@pytest.fixture
def trained(pool: ProcessPool, corpus: str, tmp_path: Path) -> Path:
    train(pool, corpus, tmp_path / "run", "--vocab-size 50000", 1)
    return tmp_path / "run"


def start_export(run: Path, out: Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron.extras.interop.commands.convert_checkpoint", "to-hf"]
    return subprocess.Popen(
        [*command, "--load", str(run), "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_an_export_that_is_killed_leaves_nothing_under_its_name(
    trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    process = start_export(trained, out)
    unfinished = tmp_path / "exported.unfinished"
    while not (unfinished / "model.safetensors").exists():
        assert process.poll() is None, "the export ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    command = ["to-hf", "--load", str(trained), "--out", str(out)]
    assert convert_checkpoint.main(command) == 0
    assert not unfinished.exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"
    # The result is never overwritten.
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert convert_checkpoint.main(command) == 2
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_a_disk_that_refuses_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    def limit_files() -> None:
        # The signal of this limit would end the process without a message.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    process = start_export(trained, tmp_path / "exported", preexec_fn=limit_files)
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert "File too large" in errors
    assert not list(tmp_path.glob("exported*"))


def test_checkpoints_are_exported_while_training_continues(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    paths = f"--data-path {corpus} --data-cache-path {tmp_path}/cache --save {folder}"
    tokenizer = f"--vocab-file {VOCAB} --merge-file {MERGES}"
    flags = f"{SIZES} {LLAMA} {paths} {tokenizer} --save-interval 2 --hf-export-interval 3 --bf16"
    output = succeed(pool.run(2, pretrain, f"{flags} --tensor-model-parallel-size 2".split()))
    # Iteration 4 is the first checkpoint of the interval from 3 on. Iteration 2 has none.
    assert f"exported iteration 4 to {folder / 'hf' / 'global_step4'}" in output
    assert [path.name for path in (folder / "hf").iterdir() if path.is_dir()] == ["global_step4"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf" / "global_step4")
    assert model.dtype == torch.bfloat16
    # A resume does not export the interval again. A failed export is a warning.
    (folder / "hf" / "global_step6.unfinished").write_text("in the way")
    again = succeed(
        pool.run(1, pretrain, f"{flags} --load {folder} --train-iters 8 --lr-decay-iters 4".split())
    )
    assert "exported iteration 4" not in again
    assert "warning: the export of iteration 6 failed (exit code 2)" in again
    assert "File exists" in (folder / "hf" / "export.log").read_text()
    assert (folder / "global_step8").is_dir()


@pytest.mark.full
def test_a_checkpoint_stays_until_its_export_has_ended(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    paths = f"--data-path {corpus} --data-cache-path {tmp_path}/cache --save {folder}"
    tokenizer = f"--vocab-file {VOCAB} --merge-file {MERGES}"
    retention = "--save-interval 1 --hf-export-interval 4 --keep-latest-checkpoints 1"
    flags = f"{SIZES} {LLAMA} {paths} {tokenizer} {retention} --train-iters 6"
    output = succeed(pool.run(1, pretrain, flags.split()))
    assert f"exported iteration 4 to {folder / 'hf' / 'global_step4'}" in output
    # The export takes much longer than the steps after it.
    assert output.index("exported iteration 4") > output.index("global_step5")
    assert sorted(path.name for path in folder.glob("global_step*")) == [
        "global_step4",
        "global_step6",
    ]
