"""Import of checkpoints of Megatron-LM and Megatron-DeepSpeed, from the writers of this folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.megatron_writers import (
    Saved,
    read_saved,
    their_modules,
    write_megatron_deepspeed,
    write_megatron_lm,
    write_torch_dist,
)
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.interop.convert.fields import normalise_model
from megatron.extras.interop.convert.megatron_args import SavedRun, load_run_config
from megatron.observe.metrics import read_metrics

SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 --lr 2e-2 --min-lr 1e-3 "
    "--train-iters 4 --lr-decay-style cosine --lr-decay-iters 4 --lr-warmup-iters 1 --eval-iters 0 "
    "--init-method-std 0.2 --save-interval 2 --log-interval 1"
)
MODELS = {
    "gpt2": "",
    "bloom": "--position-embedding-type alibi --embed-layernorm",
    "glu": "--position-embedding-type rotary --glu-activation swiglu --ffn-hidden-size 48",
    "llama": (
        "--num-query-groups 2 --ffn-hidden-size 48 --glu-activation swiglu --normalization RMSNorm "
        "--position-embedding-type rotary --no-add-bias-linear "
        "--untie-embeddings-and-output-weights"
    ),
}
Write = Callable[[Path, Saved], Path]


def name_paths(corpus: str, folder: Path) -> str:
    return f"--data-path {corpus} --data-cache-path {folder}/cache --save {folder}"


@pytest.fixture(scope="module")
def trained(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that trains a model for 4 iterations, with checkpoints after 2 and 4."""
    done: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            flags = (
                f"{SIZES} {MODELS[name]} {name_paths(corpus, folder)} --vocab-file {VOCAB} "
                f"--merge-file {MERGES}"
            )
            succeed(pool.run(1, pretrain, flags.split()))
            done[name] = folder
        return done[name]

    return train


def run_import(system: str, source: Path, out: Path, *more: str) -> int:
    return convert_checkpoint.main(
        [f"from-{system}", "--load", str(source), "--out", str(out), *more]
    )


LAYOUTS: dict[str, tuple[str, str, Write, bool]] = {
    "layers, TP 1, PP 1": (
        "megatron-deepspeed",
        "gpt2",
        lambda root, saved: write_megatron_deepspeed(root, saved, 1, 1),
        False,
    ),
    "ZeRO 1, TP 2, PP 2, DP 3": (
        "megatron-deepspeed",
        "bloom",
        lambda root, saved: write_megatron_deepspeed(
            root, saved, 2, 2, dp=3, prefix="bf16_", dtype=torch.bfloat16
        ),
        True,
    ),
    "ZeRO 1 in fp16, TP 2, gated": (
        "megatron-deepspeed",
        "glu",
        lambda root, saved: write_megatron_deepspeed(root, saved, 2, 1, dp=2, dtype=torch.float16),
        True,
    ),
    "universal": (
        "megatron-deepspeed",
        "gpt2",
        lambda root, saved: write_megatron_deepspeed(root, saved, 2, 2, universal=True),
        True,
    ),
    "universal, gated, TP 2": (
        "megatron-deepspeed",
        "glu",
        lambda root, saved: write_megatron_deepspeed(root, saved, 2, 2, universal=True),
        True,
    ),
    "ranks, version 0, TP 2": (
        "megatron-lm",
        "gpt2",
        lambda root, saved: write_megatron_lm(root, saved, 2, 1, core=False, version=0),
        False,
    ),
    "ranks, version 1, PP 2": (
        "megatron-lm",
        "gpt2",
        lambda root, saved: write_megatron_lm(root, saved, 1, 2, core=False, version=1.0),
        False,
    ),
    "ranks of the core, TP 2, PP 2, virtual stages": (
        "megatron-lm",
        "llama",
        lambda root, saved: write_megatron_lm(root, saved, 2, 2, core=True, virtual=2),
        False,
    ),
    "ranks of the core, tied, PP 2": (
        "megatron-lm",
        "gpt2",
        lambda root, saved: write_megatron_lm(root, saved, 2, 2, core=True),
        False,
    ),
    "torch_dist": (
        "megatron-lm",
        "llama",
        lambda root, saved: write_torch_dist(root, saved, states=True),
        True,
    ),
    "torch_dist without states": (
        "megatron-lm",
        "gpt2",
        lambda root, saved: write_torch_dist(root, saved, states=False),
        False,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_imported_tensors_are_equal(
    layout: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    system, model, write, has_states = LAYOUTS[layout]
    saved = read_saved(open_checkpoint(trained(model), 2))
    write(tmp_path / "theirs", saved)
    out = tmp_path / "imported"
    vocabulary = [] if system == "megatron-deepspeed" else ["--vocab-size", str(saved.vocab_size)]
    assert run_import(system, tmp_path / "theirs", out, *vocabulary) == 0
    checkpoint = open_checkpoint(out, 2)
    assert (checkpoint.optimizer is not None) == has_states
    if has_states:
        found = read_saved(checkpoint).tensors
    else:
        found = read_weights(checkpoint)
    expected = {
        key: tensor for key, tensor in saved.tensors.items() if has_states or key[0] == "weight"
    }
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    same = [
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "lr_samples",
        "lr_tokens",
        "lr_schedule",
    ]
    if system == "megatron-deepspeed":
        # Megatron-LM has no schedule in tokens.
        same.append("warmup_tokens")
    assert {n: checkpoint.state[n] for n in same} == {n: saved.state[n] for n in same}
    before = open_checkpoint(trained(model), 2).read_config()
    assert normalise_model(checkpoint.read_config().model) == normalise_model(before.model)
    assert checkpoint.read_config().loss.loss_mean == "microbatch"


def test_the_mean_of_the_loss_is_that_of_the_saved_arguments() -> None:
    args = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 8,
        "micro_batch_size": 1,
    }
    for per_token, mean in ((False, "microbatch"), (True, "step")):
        saved = SavedRun({**args, "calculate_per_token_loss": per_token}, 1, 3.0, None, {}, None)
        loaded, unused = load_run_config(saved, 100)
        assert loaded.config.loss.loss_mean == mean
        assert unused == []


def test_a_universal_checkpoint_with_unknown_halves_is_refused(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_saved(open_checkpoint(trained("glu"), 2))
    folder = write_megatron_deepspeed(tmp_path / "theirs", saved, 2, 1, universal=True)
    for path in folder.glob("zero/*dense_h_to_4h.weight/*.pt"):
        if path.name != "step.pt":
            content = torch.load(path, weights_only=True)
            del content["param_n_sub_params"]
            torch.save(content, path)
    assert run_import("megatron-deepspeed", tmp_path / "theirs", tmp_path / "imported") == 2
    assert "does not say how the halves of a gated MLP were merged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def read_weights(checkpoint: Any) -> dict[tuple[str, str], torch.Tensor]:
    model = load_model(checkpoint)
    return {("weight", name): p.detach() for name, p in model.named_parameters()}


def train_on(pool: ProcessPool, corpus: str, imported: Path, save: Path, *flags: str) -> Path:
    """Continue an imported run with the configuration that was imported with it."""
    (config,) = imported.glob("global_step*/config.yaml")
    command = (
        f"--config {config} --load {imported} {name_paths(corpus, save)} --log-interval 1 "
        f"--vocab-file {VOCAB} --merge-file {MERGES}"
    )
    succeed(pool.run(1, pretrain, [*command.split(), *flags]))
    return save


@pytest.mark.parametrize("layout", ["universal", "torch_dist", "ZeRO 1, TP 2, PP 2, DP 3"])
def test_a_run_goes_on_as_if_it_had_not_been_imported(
    layout: str,
    trained: Callable[[str], Path],
    pool: ProcessPool,
    corpus: str,
    tmp_path: Path,
) -> None:
    system, model, write, _ = LAYOUTS[layout]
    saved = read_saved(open_checkpoint(trained(model), 2))
    write(tmp_path / "theirs", saved)
    out = tmp_path / "imported"
    vocabulary = [] if system == "megatron-deepspeed" else ["--vocab-size", str(saved.vocab_size)]
    assert run_import(system, tmp_path / "theirs", out, *vocabulary) == 0
    again = train_on(pool, corpus, out, tmp_path / "again")
    keys = ("iteration", "lm_loss", "learning_rate", "grad_norm", "consumed_samples")
    expected, found = (
        [{key: entry[key] for key in keys} for entry in read_metrics(folder / "metrics.jsonl")]
        for folder in (trained(model), again)
    )
    assert [entry["iteration"] for entry in found] == [3, 4]
    assert found == expected[2:]
    last = read_saved(open_checkpoint(again, 4))
    for key, tensor in read_saved(open_checkpoint(trained(model), 4)).tensors.items():
        assert torch.equal(last.tensors[key], tensor), key


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (path,) = folder.rglob(name)
            path.unlink()

    return change


def edit(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a function that changes the content of one of their files."""

    def rewrite(folder: Path) -> None:
        (path,) = folder.rglob(name)
        with their_modules():
            content = torch.load(path, weights_only=False)
            change(content)
            torch.save(content, path)

    return rewrite


def set_args(**values: Any) -> Callable[[Any], None]:
    return lambda content: vars(content["args"]).update(values)


def replace_pointer_by_fifo(folder: Path) -> None:
    (folder / "latest").unlink()
    os.mkfifo(folder / "latest")


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


DENSE = "self_attention.dense.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing rank file": (
        remove("mp_rank_01_model_states.pt"),
        "has 3 of mp_rank_*_model_states.pt",
    ),
    "a missing layer file of a rank": (
        remove("layer_04-model_01-model_states.pt"),
        "layer_04 of the tensor-parallel ranks [0]",
    ),
    "a missing layer": (
        remove("layer_04-model_00-model_states.pt", "layer_04-model_01-model_states.pt"),
        "of layer 3 is missing",
    ),
    "a missing optimizer file": (
        remove("zero_pp_rank_1_mp_rank_02_optim_states.pt"),
        "optimizer files of the data-parallel ranks [0] for mp_rank_02",
    ),
    "a shape that does not fit": (
        edit(
            "mp_rank_00_model_states.pt",
            lambda c: c["param_shapes"][0].update({f"3.{DENSE}": torch.Size((16, 16))}),
        ),
        "and its shape is (16, 16)",
    ),
    "a tensor that is not known": (
        edit(
            "layer_03-model_00-model_states.pt",
            lambda c: c.update({"mlp.experts.weight": torch.ones(2)}),
        ),
        "3.mlp.experts.weight is not known",
    ),
    "a wrong tensor-parallel size": (
        edit("mp_rank_00_model_states.pt", set_args(tensor_model_parallel_size=1)),
        "need 2",
    ),
    "a number that is not finite": (
        edit(
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            lambda c: c["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].fill_(
                float("nan")
            ),
        ),
        "not finite",
    ),
    "other sizes in the arguments": (
        edit("mp_rank_00_model_states.pt", set_args(ffn_hidden_size=64)),
        "must have (64, 32)",
    ),
    "too many layers": (
        edit("mp_rank_00_model_states.pt", set_args(num_layers=10**9)),
        "1000000000 layers, and the checkpoint",
    ),
    "a part that is not possible here": (
        edit("mp_rank_00_model_states.pt", set_args(num_experts=4)),
        "mlp.router.weight of layer 0 is missing",
    ),
    "a part that leaves no trace in the tensors": (
        edit("mp_rank_00_model_states.pt", set_args(qk_l2_norm=True)),
        "--qk-l2-norm is not possible here",
    ),
    "no arguments": (
        edit("mp_rank_00_model_states.pt", lambda c: c.pop("args")),
        "has no 'args'",
    ),
    "a pickle with code": (
        lambda folder: torch.save(
            {"args": Code()}, next(folder.rglob("mp_rank_00_model_states.pt"))
        ),
        "system, which is not allowed",
    ),
    "a pointer that is a FIFO": (
        replace_pointer_by_fifo,
        "latest: it is not a regular file",
    ),
    "a pointer to nowhere": (
        lambda folder: (folder / "latest").write_text("../other"),
        "there is no such checkpoint",
    ),
}


@pytest.fixture(scope="module")
def theirs(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    saved = read_saved(open_checkpoint(trained("gpt2"), 2))
    write_megatron_deepspeed(folder, saved, 2, 2, dp=2)
    return folder


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_and_nothing_is_written(
    bad: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = BAD[bad]
    source = shutil.copytree(theirs, tmp_path / "source")
    damage(source)
    assert run_import("megatron-deepspeed", source, tmp_path / "imported") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_parts_of_megatron_lm_are_refused(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_saved(open_checkpoint(trained("gpt2"), 2))
    folder = write_megatron_lm(tmp_path / "ranks", saved, 2, 1, core=True)
    shutil.rmtree(folder / "mp_rank_01")
    assert run_import("megatron-lm", tmp_path / "ranks", tmp_path / "imported") == 2
    assert "has 1 of mp_rank_*" in capsys.readouterr().err
    folder = write_torch_dist(tmp_path / "dist", saved, states=True)
    for path in folder.glob("*.distcp"):
        path.unlink()
    assert run_import("megatron-lm", tmp_path / "dist", tmp_path / "imported") == 2
    assert ".distcp cannot be read" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "ranks"]


def test_replicas_that_drifted_apart_are_averaged(
    trained: Callable[[str], Path], tmp_path: Path
) -> None:
    saved = read_saved(open_checkpoint(trained("gpt2"), 2))
    folder = write_megatron_deepspeed(tmp_path / "theirs", saved, 2, 1)

    def drift(content: Any) -> None:
        content["input_layernorm.weight"] += 1.0

    edit("layer_03-model_01-model_states.pt", drift)(folder)
    out = tmp_path / "imported"
    assert run_import("megatron-deepspeed", tmp_path / "theirs", out) == 0
    found = read_weights(open_checkpoint(out, 2))["weight", "blocks.0.input_norm.weight"]
    expected = saved.tensors["weight", "blocks.0.input_norm.weight"] + 0.5
    assert torch.allclose(found, expected, atol=1e-6)
