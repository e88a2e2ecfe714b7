"""Import of checkpoints of nanoGPT and llm-baselines, from the writers of this folder."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from convert.other_trainers import (
    HEADS,
    NANOGPT_CONFIG,
    Model,
    build_llm_baselines_optimizer,
    build_nanogpt,
    build_nanogpt_optimizer,
    compute_nanogpt_rate,
    fill_states,
    save_llm_baselines,
    save_nanogpt,
    train,
)
from process_pool import ProcessPool, pretrain, succeed

from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.manifest import collect_digests
from megatron.checkpoint.tensor_file import TensorReader
from megatron.data.indexed import IndexedDatasetWriter
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint
from megatron.observe.metrics import read_metrics

ROWS = 64
"""Rows of the embedding. The last ones are padding."""
VOCAB = 60


def run(trainer: str, source: Path, out: Path, *more: str) -> int:
    return convert_checkpoint.main(
        [f"from-{trainer}", "--load", str(source), "--out", str(out), *more]
    )


def read_kind(checkpoint: Checkpoint, kind: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a kind, by name."""
    index = checkpoint.read_index()
    found = {}
    with TensorReader(checkpoint.folder, collect_digests(checkpoint.manifest, index)) as reader:
        for key, entry in index.tensors.items():
            if key.startswith(f"{kind}/"):
                tensor = torch.empty(entry["shape"])
                whole = ((0,) * tensor.dim(), tuple(entry["shape"]))
                reader.read_into(tensor, whole, entry, key)
                found[key.removeprefix(f"{kind}/")] = tensor
    return found


def check_model(theirs: Model, checkpoint: Checkpoint, *, vocab_size: int = VOCAB) -> None:
    """Compare the logits of both models, and the moments with those of `fill_states`."""
    ours = load_model(checkpoint)
    tokens = torch.randint(0, vocab_size, (3, 16))
    with torch.no_grad():
        difference = ours.compute_logits(tokens) - theirs(tokens)[..., :vocab_size]
    assert difference.abs().max() < 1e-5
    weights = read_kind(checkpoint, "weight")
    assert len(weights) > 10
    for name, average in read_kind(checkpoint, "exp_avg").items():
        assert torch.equal(average, 0.5 * weights[name] + 1), name
    for name, average in read_kind(checkpoint, "exp_avg_sq").items():
        assert torch.equal(average, weights[name].square()), name


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_computes_the_same_and_keeps_its_states(
    bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = NANOGPT_CONFIG | {"bias": bias, "compile": bias}
    theirs = build_nanogpt(config, ROWS)
    optimizer = build_nanogpt_optimizer(theirs, config)
    fill_states(theirs, optimizer, 7)
    save_nanogpt(tmp_path / "out" / "ckpt.pt", theirs, optimizer, config, 7)
    command = (tmp_path / "out", tmp_path / "imported", "--vocab-size", str(VOCAB))
    assert run("nanogpt", *command) == 0
    assert "iteration 7, 28 samples, 448 tokens" in capsys.readouterr().out
    checkpoint = open_checkpoint(tmp_path / "imported", 7)
    check_model(theirs, checkpoint)
    assert checkpoint.optimizer == {"optimizer_step": 7}
    assert checkpoint.read_config().loss.loss_mean == "microbatch"
    # The same command does not replace the result.
    assert run("nanogpt", *command) == 2
    assert "exists" in capsys.readouterr().err
    # All rows are kept if the vocabulary is not given.
    assert run("nanogpt", tmp_path / "out", tmp_path / "all") == 0
    assert f"all {ROWS} rows" in capsys.readouterr().out
    check_model(theirs, open_checkpoint(tmp_path / "all", 7), vocab_size=ROWS)
    # Older versions have the other GELU, which the file does not say.
    assert run("nanogpt", tmp_path / "out", tmp_path / "old", "--", "--bias-gelu-fusion") == 0
    assert open_checkpoint(tmp_path / "old", 7).read_config().model.bias_gelu_fusion
    assert not checkpoint.read_config().model.bias_gelu_fusion


def test_a_run_of_nanogpt_goes_on_with_the_same_losses(pool: ProcessPool, tmp_path: Path) -> None:
    """Train 4 steps there, import, and compare the next 3 steps here and there."""
    config = NANOGPT_CONFIG
    theirs = build_nanogpt(config, ROWS)
    optimizer = build_nanogpt_optimizer(theirs, config)
    # The data repeat themselves, so every sample is the same in any order.
    period = torch.randint(0, VOCAB, (config["block_size"],))
    sample = torch.cat((period, period[:1]))
    batch = sample.expand(4, -1)
    for iteration in range(2, 6):
        train(theirs, optimizer, batch, compute_nanogpt_rate(config, iteration))
    for state in optimizer.state.values():
        state["step"].fill_(6)
    save_nanogpt(tmp_path / "out" / "ckpt.pt", theirs, optimizer, config, 6)
    expected = [
        train(theirs, optimizer, batch, compute_nanogpt_rate(config, iteration))
        for iteration in range(6, 9)
    ]
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.tile(period.numpy(), 100))
    imported = tmp_path / "imported"
    assert run("nanogpt", tmp_path / "out", imported) == 0
    flags = (
        f"--config {imported}/global_step6/config.yaml --load {imported} --save {tmp_path}/new "
        f"--data-path {tmp_path}/data --split 100,0,0 --eval-iters 0 --exit-interval 9"
    )
    succeed(pool.run(1, pretrain, flags.split()))
    entries = read_metrics(tmp_path / "new" / "metrics.jsonl")
    losses = {each["iteration"]: each["lm_loss"] for each in entries if "lm_loss" in each}
    assert [losses[number] for number in (7, 8, 9)] == pytest.approx(expected, rel=1e-4)
    assert expected[2] < expected[0]


LLAMA = (
    f"--model llama --n_layer 12 --n_head {HEADS} --n_embd 16 --multiple_of 8 "
    "--sequence_length 16 --batch_size 3 --acc_steps 2 --dtype float32"
)
BASE = LLAMA.replace("llama", "base")


@pytest.mark.parametrize("flags", [LLAMA, BASE])
def test_llm_baselines_computes_the_same_and_keeps_its_states(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 12 layers, because the order of names as text puts layer 10 before layer 2.
    inner = 48 if flags == LLAMA else None
    torch.manual_seed(0)
    theirs = Model(12, 16, 16, ROWS, bias=False, inner=inner)
    optimizer = build_llm_baselines_optimizer(theirs)
    fill_states(theirs, optimizer, 5)
    folder = tmp_path / "exps" / "run" / "ckpts" / "latest"
    save_llm_baselines(folder / "main.pt", theirs, optimizer, 5)
    command = ("--vocab-size", str(VOCAB), "--", *flags.split())
    assert run("llm-baselines", folder, tmp_path / "imported", *command) == 0
    assert "iteration 5, 30 samples" in capsys.readouterr().out
    check_model(theirs, open_checkpoint(tmp_path / "imported", 5))


def write_damaged(path: Path, parts: dict[str, Any]) -> Path:
    """Write a checkpoint of nanoGPT, in which `parts` replace others."""
    model = build_nanogpt(NANOGPT_CONFIG, ROWS)
    optimizer = build_nanogpt_optimizer(model, NANOGPT_CONFIG)
    fill_states(model, optimizer, 7)
    save_nanogpt(path, model, optimizer, NANOGPT_CONFIG, 7, parts)
    return path


def change_model(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the weights of a model, with some replaced or removed."""
    state: dict[str, Any] = dict(build_nanogpt(NANOGPT_CONFIG, ROWS).state_dict())
    for name, tensor in tensors.items():
        state[name.replace("_0_", ".0.").replace("__", ".")] = tensor
    return {name: tensor for name, tensor in state.items() if tensor is not None}


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def describe_bad_files() -> dict[str, tuple[dict[str, Any], str]]:
    """Return the name of a case -> changed parts, and what the message must say."""
    missing = change_model(transformer__h_0_mlp__c_fc__weight=None)
    biased = change_model(transformer__h_0_mlp__c_fc__bias=torch.ones(64))
    shaped = change_model(transformer__wpe__weight=torch.ones(8, 16))
    infinite = change_model(transformer__ln_f__weight=torch.full((16,), torch.inf))
    untied = change_model(lm_head__weight=torch.ones(ROWS, 16))
    config = {name: value for name, value in NANOGPT_CONFIG.items() if name != "min_lr"}
    weights_only: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}}
    weight = torch.ones(64, 16)
    kinds = {
        kind: change_model(transformer__h_0_mlp__c_fc__weight=tensor)
        for kind, tensor in {
            "integers": weight.to(torch.int8),
            "8 bits": weight.to(torch.float8_e4m3fn),
            "complex": weight.to(torch.complex64),
            "sparse": weight.to_sparse(),
            "meta": weight.to("meta"),
        }.items()
    }
    flat = change_model(transformer__wte__weight=torch.tensor(1.0))
    not_a_number = NANOGPT_CONFIG | {"eval_iters": math.nan}
    return {
        "code": ({"config": Code()}, "print, which is not allowed"),
        "missing": (weights_only | {"model": missing}, "h.0.mlp.c_fc.weight is missing"),
        "bias": (weights_only | {"model": biased}, "h.0.mlp.c_fc.bias has no part in the model"),
        "shape": (weights_only | {"model": shaped}, "wpe.weight has the shape (8, 16)"),
        "infinite": (weights_only | {"model": infinite}, "numbers that are not finite"),
        "untied": (weights_only | {"model": untied}, "lm_head.weight has no part in the model"),
        "setting": ({"config": config}, "'min_lr'"),
        "type": ({"config": NANOGPT_CONFIG | {"dtype": "float8"}}, "'float8'"),
        "count": ({"iter_num": -1}, "iter_num must be a count"),
        "tensors": ({"model": 5}, "model must be a dictionary"),
        "integers": (weights_only | {"model": kinds["integers"]}, "is torch.int8, and must be"),
        "8 bits": (weights_only | {"model": kinds["8 bits"]}, "is torch.float8_e4m3fn"),
        "complex": (weights_only | {"model": kinds["complex"]}, "is torch.complex64"),
        "sparse": (weights_only | {"model": kinds["sparse"]}, "Only dense tensors are read"),
        "meta": (weights_only | {"model": kinds["meta"]}, "Only dense tensors are read"),
        "flat": (weights_only | {"model": flat}, "has no word embedding"),
        "nan": ({"config": not_a_number}, "cannot convert float NaN"),
        "vector": ({"config": NANOGPT_CONFIG | {"decay_lr": torch.ones(2)}}, "another value"),
    }


@pytest.mark.parametrize("case", describe_bad_files())
def test_a_bad_file_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, message = describe_bad_files()[case]
    source = write_damaged(tmp_path / "out" / "ckpt.pt", parts)
    assert run("nanogpt", source, tmp_path / "imported", "--weights-only") == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "code ran" not in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_states_of_another_optimizer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_nanogpt(NANOGPT_CONFIG, ROWS)
    source = tmp_path / "out" / "ckpt.pt"
    others = {
        # nanoGPT before 2023-05-06 had no weight decay on the embeddings.
        "one group": torch.optim.AdamW(model.parameters()),
        "another order": torch.optim.AdamW(
            [{"params": group["params"][::-1]} for group in _list_groups(model)]
        ),
        "other states": torch.optim.AdamW(_list_groups(model), amsgrad=True),
        "no moments": torch.optim.SGD(_list_groups(model), lr=1.0, momentum=0.9),
    }
    for name, optimizer in others.items():
        train(model, optimizer, torch.ones((1, 17), dtype=torch.int64), 1e-3)
        save_nanogpt(source, model, optimizer, NANOGPT_CONFIG, 1)
        assert run("nanogpt", source, tmp_path / "imported") == 2, name
        assert "give --weights-only" in capsys.readouterr().err, name
    assert run("nanogpt", source, tmp_path / "imported", "--weights-only") == 0
    assert "the optimizer's states are not imported" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "imported", 1).optimizer is None


def _list_groups(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": group["params"]}
        for group in build_nanogpt_optimizer(model, NANOGPT_CONFIG).param_groups
    ]


def test_flags_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = Model(1, 16, 16, ROWS, bias=False, inner=48)
    source = tmp_path / "main.pt"
    save_llm_baselines(source, theirs, build_llm_baselines_optimizer(theirs), 5)
    flags = LLAMA.replace("--n_layer 12", "--n_layer 2")
    for given, message in (
        (flags, "h.1.ln_1.weight is missing"),
        (f"{LLAMA} --moe", "--moe"),
        ("", "--num-layers"),
        (f"{LLAMA} --rotary-percent 0.5 --n_layer 1", "rotate all channels"),
    ):
        command = ("--weights-only", "--", *given.split())
        assert run("llm-baselines", source, tmp_path / "imported", *command) == 2
        assert message in capsys.readouterr().err
    assert run("megatron-lm", source, tmp_path / "imported", "--", "--bias") == 2
    assert "flags of a run are for" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
