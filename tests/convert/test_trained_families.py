"""Each family, trained at TP 2 x PP 2 and exported, equals `transformers` with its gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model.builders import tiny_config
from model.reference_models import FAMILIES, HEADS, HIDDEN, LAYERS
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.config.presets import list_preset_names
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.interop.convert.architectures import choose_architecture
from megatron.extras.interop.translators.translator import load_config
from megatron.model.inputs import Inputs

transformers = pytest.importorskip("transformers")
LENGTH = 32
STEPS = 3
BOUND = 1e-5
SHORT = {
    "qwen3": "grouped queries, a norm of queries and keys, an untied head",
    "gpt-neox": "rotation of half of the channels, two branches beside each other",
    "olmo3": "norms after each branch and over all heads, windows on some layers",
    "qwen3-moe": "experts in one layer, and wide heads",
    "apertus": "trained numbers in the activation",
}
"""Families of the short suite, and what makes each irregular."""
HYBRIDS = ("qwen3-next", "olmo-hybrid")
"""Families that `test_convert_hybrids.py` trains and exports."""


def train(pool: ProcessPool, corpus: str, folder: Path, family: str, tp: int, pp: int) -> None:
    """Train a few steps with a large learning rate, so that no weight keeps its first value."""
    model = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "seq_length": LENGTH,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "init_method_std": 0.2,
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model | dict(FAMILIES[family].ours)}))
    command = (
        f"--config {config} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--data-path {corpus} --data-cache-path {folder}/cache --vocab-file {VOCAB} "
        f"--merge-file {MERGES} --save {folder}/run --micro-batch-size 2 --global-batch-size 4 "
        f"--train-iters {STEPS} --lr 2e-2 --eval-iters 0"
    )
    succeed(pool.run(tp * pp, pretrain, command.split()))


def check_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compare the gradients of each parameter, relative to their norm."""
    whole = torch.stack([each.norm() for each in theirs.values()]).norm()
    for name, gradient in theirs.items():
        # The gradient of a key's bias is zero but for rounding.
        norm = max(gradient.norm(), 1e-2 * whole)
        difference = (ours[name] - gradient).norm() / norm
        assert difference < BOUND, f"{name}: {difference:.1e}"


def check_export(family: str, run: Path, out: Path) -> None:
    """Export a run, and compare logits, loss and gradients with `transformers`."""
    assert convert_checkpoint.main(["to-hf", "--load", str(run), "--out", str(out)]) == 0
    ours = load_model(open_checkpoint(run, STEPS)).train()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 5000, (2, LENGTH + 1), generator=generator)
    expected = theirs(tokens[:, :-1]).logits
    logits = ours.compute_logits(tokens[:, :-1])
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
    their_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten())
    their_loss.backward()
    loss = ours(None, Inputs(tokens[:, :-1], tokens[:, 1:]))
    loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=BOUND)
    found: dict[str, Any] = {name: parameter.grad for name, parameter in ours.named_parameters()}
    given: dict[str, Any] = {name: each.grad for name, each in theirs.named_parameters()}
    # The names and layouts are those of the tests of the model, not those of the conversion.
    check_gradients(found, FAMILIES[family].convert(given, list(found)))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.full)
        for name in FAMILIES
        if name not in HYBRIDS
    ],
)
def test_a_trained_model_equals_its_export(
    family: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    train(pool, corpus, tmp_path, family, 2, 2)
    check_export(family, tmp_path / "run", tmp_path / "exported")


def test_a_model_trained_on_three_uneven_stages_equals_its_export(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    train(pool, corpus, tmp_path, "smollm3", 1, 3)
    check_export("smollm3", tmp_path / "run", tmp_path / "exported")


def test_every_preset_is_exported_as_a_family_that_is_tested() -> None:
    tested = {
        choose_architecture(tiny_config(num_layers=LAYERS, **family.ours)).model_type
        for family in FAMILIES.values()
    }
    refused = []
    for preset in list_preset_names():
        command = ["--preset", preset, "--micro-batch-size", "1", "--vocab-size", "100"]
        model = load_config(command).config.model
        try:
            assert choose_architecture(model).model_type in tested
        except ConfigError:
            refused.append(preset)
    # No class has both a table of positions and a norm of the embedding.
    assert refused == ["tr8-104b"]
