"""A step that another trainer has recorded, healthy and with errors, is compared with ours."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from convert.other_trainers import (
    NANOGPT_CONFIG,
    build_nanogpt,
    build_nanogpt_optimizer,
    fill_states,
    save_nanogpt,
)
from process_pool import ProcessPool, pretrain, succeed
from torch import Tensor, nn

from megatron.commands import verify
from megatron.extras.interop.commands import convert_checkpoint

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "compared_steps"
Change = Callable[[Any], None]


def record(path: Path, model: nn.Module, logits: Callable[[Tensor], Tensor], rows: int) -> Path:
    """Record one step as the page describes it."""
    tokens = torch.randint(0, rows, (2, 17), generator=torch.Generator().manual_seed(1))
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h  # type: ignore[union-attr]
    inputs: list[float] = []
    for layer in layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(
            lambda _, given: inputs.append(given[0].square().mean().sqrt().item())
        )
    loss = F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {
        name: parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    step = {
        "tokens": tokens.tolist(),
        "loss": loss.item(),
        "gradients": gradients,
        "inputs": inputs,
    }
    path.write_text(json.dumps(step))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder of transformers, and the same model imported."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hf")
    command = ["from-hf", "--model", str(folder / "hf"), "--out", str(folder / "imported")]
    assert convert_checkpoint.main(command) == 0
    return folder / "hf", folder / "imported"


def leave_out_scale(model: Any) -> None:
    """Attention of layer 2 does not divide its logits."""
    model.model.layers[2].self_attn.scaling = 1.0


def rotate_by_other_base(model: Any) -> None:
    """All layers rotate by another base, as if --rotary-base were forgotten."""
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(500_000.0 ** -(torch.arange(len(frequencies)) / len(frequencies)))


def lose_gradient(model: Any) -> None:
    """The gradient of one matrix is halved, as if a rank's part were left out of a sum."""
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient / 2)


def cut_gradient(model: Any) -> None:
    """What layer 2 sends back is twice as large, as if it were added up twice."""

    def double(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given[0].register_hook(lambda gradient: gradient * 2)
        return given

    model.model.layers[2].register_forward_pre_hook(double)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda model: None, None),
        (leave_out_scale, "input of layer 3"),
        (rotate_by_other_base, "input of layer 1"),
        (lose_gradient, "gradient of model.layers.1.mlp.up_proj.weight"),
        (cut_gradient, "gradient of model.layers.1.mlp.down_proj.weight"),
    ],
    ids=["healthy", "scale", "rotary base", "half a gradient", "twice a gradient"],
)
def test_the_first_number_that_differs_is_named(
    llama: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: Change,
    first: str | None,
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(llama[0])
    change(model)
    step = record(tmp_path / "step.json", model, lambda tokens: model(tokens).logits, 61)
    command = ["--compare", str(step), "--weights", str(llama[1])]
    assert verify.main([*command, "--json"]) == (0 if first is None else 1)
    found = json.loads(capfd.readouterr().out)
    assert found["first"] == first
    # The inputs of 4 layers, the loss, 9 parameters in each layer, and 3 others.
    assert len(found["numbers"]) == 4 + 1 + 4 * 9 + 3
    assert verify.main(command) == (0 if first is None else 1)
    printed = capfd.readouterr().out
    assert ("equal: all 44 numbers" if first is None else first) in printed


MEGATRON = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda model: None, None),
        (lose_gradient, "gradient of decoder.layers.1.mlp.linear_fc1.weight"),
    ],
)
def test_a_step_of_megatron(
    llama: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: Change,
    first: str | None,
) -> None:
    """The norm of a fused matrix is that of its parts together."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama[0])
    change(model)
    path = record(tmp_path / "step.json", model, lambda tokens: model(tokens).logits, 61)
    step = json.loads(path.read_text())
    norms = step["gradients"]
    step["gradients"] = {
        "embedding.word_embeddings.weight": norms["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": norms["model.norm.weight"],
        "output_layer.weight": norms["lm_head.weight"],
    } | {
        f"decoder.layers.{layer}.{theirs}.weight": math.hypot(
            *(norms[f"model.layers.{layer}.{part}.weight"] for part in parts)
        )
        for layer in range(4)
        for theirs, parts in MEGATRON.items()
    }
    path.write_text(json.dumps(step))
    code = verify.main(["--compare", str(path), "--weights", str(llama[1]), "--json"])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["first"]) == (0 if first is None else 1, first)
    assert len(found["numbers"]) == 4 + 1 + 4 * 6 + 3


HYBRID = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--init-method-std 0.2 --softmax-type learnable --linear-attention-freq ([1]*3+[0]*1) "
    "--experimental-attention-variant gated_delta_net --linear-key-head-dim 16 "
    "--linear-value-head-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1 --mock-data "
    "--vocab-size 64 --make-vocab-size-divisible-by 64 --eval-iters 0 --save-interval 1"
)
"""The model whose steps Megatron core 0.16.1 recorded, with its local layers."""


def test_recorded_steps_of_megatron_core(
    pool: ProcessPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two tensor-parallel ranks have findings 8 and 11 of NVIDIA/Megatron-LM#7452."""
    succeed(pool.run(1, pretrain, [*HYBRID.split(), "--save", str(tmp_path)]))
    different = []
    for ranks in (1, 2):
        step = FIXTURES / f"megatron_core_tp{ranks}.json"
        verify.main(["--compare", str(step), "--weights", str(tmp_path), "--json"])
        found = json.loads(capfd.readouterr().out)
        # The inputs of 4 layers, the loss, parameters of layers and of both ends, and their norm.
        assert len(found["numbers"]) == 4 + 1 + (3 * 10 + 7) + 3 + 1
        numbers = [each["name"] for each in found["numbers"] if each["difference"] > 1e-3]
        assert found["first"] == next(iter(numbers), None)
        different.append(numbers)
    attention = "gradient of decoder.layers.{}.self_attention.{}"
    assert different[0] == []
    assert different[1] == [
        attention.format(3, "core_attention.softmax_offset"),
        *(attention.format(layer, "out_norm.weight") for layer in (2, 1, 0)),
    ]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_of_nanogpt(wrong: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_nanogpt(NANOGPT_CONFIG, 64)
    optimizer = build_nanogpt_optimizer(model, NANOGPT_CONFIG)
    fill_states(model, optimizer, 1)
    save_nanogpt(tmp_path / "ckpt.pt", model, optimizer, NANOGPT_CONFIG, 1)
    out = tmp_path / "imported"
    command = ["from-nanogpt", "--load", str(tmp_path / "ckpt.pt"), "--out", str(out)]
    assert convert_checkpoint.main(command) == 0
    model.zero_grad()
    if wrong:
        # The labels are not shifted.
        logits: Any = lambda tokens: model(tokens).roll(1, dims=1)  # noqa: E731
    else:
        logits = model
    step = record(tmp_path / "step.json", model, logits, 60)
    assert verify.main(["--compare", str(step), "--weights", str(out)]) == int(wrong)
    printed = capfd.readouterr().out
    assert ("order of a step: loss" in printed) == wrong


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [[1, 2], [3]]}, "cannot be read as a step"),
        ({"tokens": [1, 2]}, "must be a list of samples"),
        ({"tokens": [[1, 99]]}, "token ids from 1 to 99, and they must be 0 to 60"),
        ({"gradients": {"x.weight": 1.0}}, "the model lacks x.weight"),
        ({"gradients": {}}, "gradients is empty"),
        ({"inputs": [1.0]}, "inputs of 1 layers, and the model has 4"),
        ({"loss": None}, "cannot be read as a step"),
        ({"norm": "large"}, "cannot be read as a step"),
    ],
)
def test_a_wrong_step_is_refused(
    llama: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: dict[str, object],
    reason: str,
) -> None:
    step = {"tokens": [[1, 2, 3]], "loss": 1.0, "gradients": {"lm_head.weight": 1.0}, **change}
    path = tmp_path / "step.json"
    path.write_text(json.dumps(step))
    assert verify.main(["--compare", str(path), "--weights", str(llama[1])]) == 2
    assert reason in capfd.readouterr().err
    for wrong in (
        ["--compare", str(path)],
        ["--compare", str(path), "--weights", "x", "--lr", "1"],
    ):
        assert verify.main(wrong) == 2


def test_a_loss_that_is_not_finite_differs(
    llama: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = {"tokens": [[1, 2, 3]], "loss": math.nan, "gradients": {"lm_head.weight": 1.0}}
    path = tmp_path / "step.json"
    path.write_text(json.dumps(step))
    assert verify.main(["--compare", str(path), "--weights", str(llama[1])]) == 1
    assert "order of a step: loss" in capfd.readouterr().out
