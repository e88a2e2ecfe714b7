"""Import of checkpoints that DeepSpeed and Megatron core wrote themselves.

The files are in tests/fixtures/megatron, with the programs that made them:

- core-torch-dist: megatron-core 0.16.1, a model like Llama with Adam's moments.
- core-ranks, core-distrib-optim, core-fully-reshardable, core-dp-reshardable: the optimizers of
  megatron-core 0.16.1, as make_core_optimizer.py describes.
- deepspeed-zero1: DeepSpeed 0.19.8, a pipeline like BigScience's GPT in bf16 with ZeRO 1, at 2
  stages x 2 tensor-parallel x 2 data-parallel ranks.
- deepspeed-universal: the same, converted by DeepSpeed's ds_to_universal.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.megatron_writers import read_saved
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.commands import convert_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
CORE = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "head.weight": "output_layer.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "input_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attention.linear_qkv.weight",
    "attention.out.weight": "self_attention.linear_proj.weight",
    "post_attention_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.down.weight": "mlp.linear_fc2.weight",
}


def read_core_truth() -> Callable[[str, str], Tensor]:
    """Return a function that gives the model's own tensor for one of ours."""
    truth = load_file(FIXTURES / "core-torch-dist" / "truth.safetensors")

    def find(kind: str, ours: str) -> Tensor:
        prefix = f"{kind}/"
        if ours.startswith("blocks."):
            _, layer, ours = ours.split(".", 2)
            prefix += f"decoder.layers.{layer}."
        if ours in ("mlp.gate.weight", "mlp.up.weight"):
            gate, up = truth[f"{prefix}mlp.linear_fc1.weight"].chunk(2)
            return gate if "gate" in ours else up
        return truth[prefix + CORE[ours]]

    return find


DEEPSPEED = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def read_deepspeed_truth() -> Callable[[str, str], Tensor]:
    """Return a function that joins the tensors that DeepSpeed gave on each rank."""
    ranks = {
        (stage, rank): load_file(
            FIXTURES / "deepspeed-zero1" / f"truth_pp{stage}_tp{rank}.safetensors"
        )
        for stage in range(2)
        for rank in range(2)
    }

    def find(kind: str, ours: str) -> Tensor:
        stage = 0
        if ours == "embedding.word.weight":
            name = "tied_modules.embed.word_embeddings.weight"
        elif ours == "embedding.position":
            name = "tied_modules.embed.position_embeddings.weight"
        elif ours.startswith("head.norm."):
            stage = 1
            name = f"6.{ours.removeprefix('head.norm.')}"
        else:
            _, layer, inside = ours.split(".", 2)
            stage = int(layer)
            module, _, leaf = inside.rpartition(".")
            name = f"{stage + 3}.{DEEPSPEED[module]}.{leaf}"
        key = f"{'fp32' if kind == 'weight' else kind}/{name}"
        parts = [ranks[stage, rank][key] for rank in range(2)]
        if any(each in ours for each in ("word", "qkv", "mlp.up")):
            return torch.cat(parts)[:100] if "word" in ours else torch.cat(parts)
        if ours.endswith(("out.weight", "down.weight")):
            return torch.cat(parts, dim=1)
        return parts[0]

    return find


def read_truth_of_ranks(
    fixture: str, tp: int, pp: int
) -> Callable[[], Callable[[str, str], Tensor]]:
    """Return a function that joins the tensors of the optimizer on each rank of Megatron core."""

    def read() -> Callable[[str, str], Tensor]:
        ranks = {
            (stage, rank): load_file(FIXTURES / fixture / f"truth_pp{stage}_tp{rank}.safetensors")
            for stage in range(pp)
            for rank in range(tp)
        }

        def find(kind: str, ours: str) -> Tensor:
            stage = pp - 1 if ours.startswith("head.") else 0
            name = f"{kind}/{CORE.get(ours)}"
            if ours.startswith("blocks."):
                _, number, inside = ours.split(".", 2)
                # Each stage counts its layers from 0.
                stage, layer = divmod(int(number), 2 // pp)
                half = inside in ("mlp.gate.weight", "mlp.up.weight")
                theirs = "mlp.linear_fc1.weight" if half else CORE[inside]
                name = f"{kind}/decoder.layers.{layer}.{theirs}"
            parts = [ranks[stage, rank][name] for rank in range(tp)]
            if "mlp.gate" in ours or "mlp.up" in ours:
                parts = [part.chunk(2)["up" in ours] for part in parts]
            if ours.endswith(("out.weight", "down.weight")):
                return torch.cat(parts, dim=1)
            if parts[0].dim() == 1:
                return parts[0]
            return torch.cat(parts)

        return find

    return read


@pytest.mark.parametrize(
    ("fixture", "system", "truth", "steps"),
    [
        ("core-torch-dist", "megatron-lm", read_core_truth, 1),
        ("core-ranks", "megatron-lm", read_truth_of_ranks("core-ranks", 2, 2), 2),
        ("core-distrib-optim", "megatron-lm", read_truth_of_ranks("core-ranks", 2, 2), 2),
        (
            "core-fully-reshardable",
            "megatron-lm",
            read_truth_of_ranks("core-fully-reshardable", 1, 1),
            2,
        ),
        ("deepspeed-zero1", "megatron-deepspeed", read_deepspeed_truth, 7),
        ("deepspeed-universal", "megatron-deepspeed", read_deepspeed_truth, 7),
    ],
)
def test_tensors_are_those_of_the_other_program(
    fixture: str,
    system: str,
    truth: Callable[[], Callable[[str, str], Tensor]],
    steps: int,
    tmp_path: Path,
) -> None:
    out = tmp_path / "imported"
    command = [f"from-{system}", "--load", str(FIXTURES / fixture), "--out", str(out)]
    assert convert_checkpoint.main(command) == 0
    saved = read_saved(open_checkpoint(out, 5))
    assert saved.steps == steps
    assert {kind for kind, _ in saved.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    find = truth()
    for (kind, ours), tensor in saved.tensors.items():
        assert torch.equal(tensor, find(kind, ours)), (kind, ours)
    assert saved.state["consumed_samples"] == 20
    assert saved.state["consumed_tokens"] == 320


def copy_ranks(tmp_path: Path, fixture: str) -> Path:
    return Path(shutil.copytree(FIXTURES / fixture, tmp_path / "theirs"))


def import_lm(source: Path, *more: str) -> int:
    out = source.parent / "imported"
    return convert_checkpoint.main(
        ["from-megatron-lm", "--load", str(source), "--out", str(out), *more]
    )


def rewrite(source: Path, pattern: str, change: Callable[[Any], Any]) -> None:
    """Change the content of one of their files."""
    path = sorted(source.rglob(pattern))[0]
    content = torch.load(path, weights_only=False)
    torch.save(change(content) or content, path)


def exchange_two_states(content: Any) -> None:
    """Exchange the states of two matrices with the same shape."""
    states = content["optimizer"]["optimizer"]["state"]
    copies = content["optimizer"]["fp32_from_fp16_params"][0]
    states[1], states[2] = states[2], states[1]
    copies[1], copies[2] = copies[2], copies[1]


def shift_buffer(content: Any) -> None:
    (buffer,) = content[0].values()
    buffer["param"] = buffer["param"].roll(1)


BAD_STATES: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "another order of parameters": (
        "core-ranks",
        "model_optim_rng.pt",
        exchange_two_states,
        "fp32 weights are not those of the model",
    ),
    "a missing state": (
        "core-ranks",
        "model_optim_rng.pt",
        lambda c: c["optimizer"]["optimizer"]["state"].pop(3) and None,
        "has no Adam moments of the parameter 3",
    ),
    "several optimizers": (
        "core-ranks",
        "model_optim_rng.pt",
        lambda c: c.update(optimizer=[c["optimizer"], c["optimizer"]]),
        "states of several optimizers",
    ),
    "a buffer in another order": (
        "core-distrib-optim",
        "distrib_optim.pt",
        shift_buffer,
        "fp32 weights are not those of the model",
    ),
    "buffers of an older version": (
        "core-distrib-optim",
        "distrib_optim.pt",
        lambda c: c.pop("buckets_coalesced") and None,
        "was written bucket by bucket",
    ),
    "two buffers": (
        "core-distrib-optim",
        "distrib_optim.pt",
        lambda c: c.update({1: c[0]}),
        "has 2 buffers",
    ),
}


@pytest.mark.parametrize("bad", BAD_STATES)
def test_states_that_do_not_fit_are_refused(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixture, file, change, message = BAD_STATES[bad]
    source = copy_ranks(tmp_path, fixture)
    rewrite(source, file, change)
    assert import_lm(source) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "--weights-only" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    assert import_lm(source, "--weights-only") == 0


def test_a_missing_buffer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_ranks(tmp_path, "core-distrib-optim")
    next(source.rglob("distrib_optim.pt")).unlink()
    assert import_lm(source) == 2
    assert "there is no distrib_optim.pt beside it" in capsys.readouterr().err


def test_states_that_are_stored_as_buffers_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tensor files are left out of this fixture. The refusal does not read them.
    source = copy_ranks(tmp_path, "core-dp-reshardable")
    assert import_lm(source) == 2
    assert "dp_reshardable" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
