"""Import of checkpoints of GPT-NeoX, from the writer of this folder."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from convert.neox_writer import ITERATION, LEGACY, write_neox

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint

ROWS = 64
"""Rows of the embedding. The last ones are padding."""
VOCAB = 60
RUN = """
pipe-parallel-size: {pipe}
model-parallel-size: {ranks}
num-layers: 3
hidden-size: 64
num-attention-heads: 8
seq-length: 16
max-position-embeddings: 16
pos-emb: rotary
train_micro_batch_size_per_gpu: 2
gas: 2
train-iters: 100
optimizer: {{type: Adam, params: {{lr: 0.001, betas: [0.9, 0.95]}}}}
save: /old/run
"""
NEOX = "rotary-pct: 0.25\n"
LLAMA = (
    "num_kv_heads: 4\nno_weight_tying: true\nnorm: rmsnorm\nrms_norm_epsilon: 1.0e-5\n"
    "activation: swiglu\nintermediate_size: 144\nuse_bias_in_attn_linear: false\n"
    "use_bias_in_mlp: false\n"
)


def build(kind: str, *, parallel: bool, tied: bool) -> tuple[Any, str]:
    """Return a model of `transformers` with weights in fp16, and the keys that describe it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "max_position_embeddings": 16,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    model: Any
    if kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=4, intermediate_size=48, rms_norm_eps=1e-5
        )
        model = transformers.LlamaForCausalLM(config)
        text = LLAMA
    else:
        sizes |= {"intermediate_size": 256, "rotary_pct": 0.25, "hidden_act": "gelu"}
        neox = transformers.GPTNeoXConfig(**sizes, use_parallel_residual=parallel)
        model = transformers.GPTNeoXForCausalLM(neox)
        text = f"{NEOX}gpt-j-residual: {parallel}\nno-weight-tying: {not tied}\n".lower()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.half())
    return model.eval(), text


def run(source: Path, out: Path, *more: str) -> int:
    words = ["from-gpt-neox", "--load", str(source), "--out", str(out)]
    return convert_checkpoint.main([*words, "--vocab-size", str(VOCAB), *more])


CASES: dict[str, tuple[str, bool, bool, int, bool, dict[str, str]]] = {
    "20B: layer files of two ranks": ("neox", True, False, 2, True, {}),
    "Pythia: rank file of one rank": ("neox", True, False, 1, False, {}),
    "older names, rank files of two ranks": ("neox", True, False, 2, False, LEGACY),
    "sequential branches, tied, two ranks": ("neox", False, True, 2, True, {}),
    "Llama with grouped queries, two ranks": ("llama", False, False, 2, True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_imported_model_computes_the_same_logits(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, parallel, tied, ranks, layer_files, renamed = CASES[case]
    theirs, keys = build(kind, parallel=parallel, tied=tied)
    text = RUN.format(pipe=int(layer_files), ranks=ranks) + keys
    write_neox(tmp_path / "old", theirs, ranks, text, layer_files=layer_files, renamed=renamed)
    assert run(tmp_path / "old", tmp_path / "new") == 0
    # 2 data-parallel ranks with 2 microbatches of 2 samples each.
    assert "iteration 3, 24 samples, 384 tokens" in capsys.readouterr().out
    checkpoint = open_checkpoint(tmp_path / "new", ITERATION)
    tokens = torch.randint(0, VOCAB, (3, 16))
    with torch.no_grad():
        expected = theirs(tokens).logits[..., :VOCAB]
        found = load_model(checkpoint).compute_logits(tokens)
    assert expected.std() > 1
    assert (found - expected).abs().max() < 1e-4
    config = checkpoint.read_config()
    assert config.batch.global_batch_size == 8
    assert config.parallel.tensor_model_parallel_size == 1
    assert config.optimizer.adam_beta2 == 0.95
    assert config.checkpoint.save is None


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return the folder of a step that `write_neox` wrote for two ranks, without YAML."""
    theirs, _ = build("neox", parallel=True, tied=False)
    return write_neox(tmp_path / "old", theirs, 2, None, layer_files=True)


def test_a_run_without_its_files_needs_them(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(written, tmp_path / "new") == 2
    assert "-- --config 20B.yml" in capsys.readouterr().err
    file = tmp_path / "run.yml"
    file.write_text(f"{RUN.format(pipe=1, ranks=2)}{NEOX}gpt-j-residual: true\n")
    flags = ("--", "--config", str(file), "--untie-embeddings-and-output-weights")
    assert run(written, tmp_path / "new", *flags) == 0
    config = open_checkpoint(tmp_path / "new", ITERATION).read_config()
    assert config.model.untie_embeddings_and_output_weights


def test_what_does_not_fit_is_named(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yml"
    file.write_text(RUN.format(pipe=1, ranks=2) + NEOX)
    flags = ("--", "--config", str(file))
    assert run(written, tmp_path / "new", *flags) == 2
    # The file says that the output matrix is the word embedding.
    assert "7.final_linear.weight differs from the word embedding" in capsys.readouterr().err
    (written / "layer_03-model_01-model_states.pt").unlink()
    assert run(written, tmp_path / "new", *flags) == 2
    assert "layer_03 of the tensor-parallel ranks [0]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


class Evil:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what unpickling would call."""
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "layer_02-model_01-model_states.pt"]
)
def test_nothing_in_a_file_is_run(
    name: str,
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"iteration": 3, "module": Evil()}, written / name)
    assert run(written, tmp_path / "new") == 2
    assert "mkdir" in capsys.readouterr().err
    assert not (tmp_path / "evil-was-here").exists()
