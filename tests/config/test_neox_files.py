"""Tests of the YAML files of GPT-NeoX: what each key means, several files, errors."""

from pathlib import Path
from typing import Any

import pytest
from config.neox_texts import MODEL, SETUP

from megatron.base.errors import ConfigError
from megatron.commands import plan as plan_tool
from megatron.config.fields import ConfigWithOrigin, LoadedConfig
from megatron.extras.interop.translators.translator import load_config
from megatron.model.shape import ModelShape
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

SMALL = """
pipe_parallel_size: 0
model_parallel_size: 1
num_layers: 2
hidden_size: 48
num_attention_heads: 4
seq_length: 16
max_position_embeddings: 16
train_micro_batch_size_per_gpu: 2
train_iters: 100
optimizer: {type: Adam, params: {lr: 0.001}}
"""


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes texts to files and returns their paths."""

    def write_texts(*texts: str) -> list[str]:
        paths = [tmp_path / f"{number}.yml" for number, _ in enumerate(texts)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return list(map(str, paths))

    return write_texts


@pytest.fixture
def load(write):
    """Return a function that loads texts as files of --config, with flags after them."""

    def load_texts(*texts: str, flags: str = "") -> LoadedConfig:
        return load_config(["--config", *write(*texts), *flags.split()])

    return load_texts


@pytest.fixture
def fail(load):
    """Return a function that returns the message of the error that loading gives."""

    def load_and_fail(*texts: str, flags: str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            load(*texts, flags=flags)
        return str(caught.value)

    return load_and_fail


def plan(loaded: LoadedConfig, world_size: int) -> Plan:
    return resolve(loaded.config, world_size, loaded.origin)


def read(loaded: LoadedConfig, *dotted: str) -> list[Any]:
    values = ConfigWithOrigin(loaded.config, {})
    return [values[each] for each in dotted]


EXPECTED = {
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.tensor_model_parallel_size": 2,
    "parallel.zero_stage": 1,
    "parallel.deepspeed": False,
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": None,
    "model.seq_length": 32,
    "model.position_embedding_type": "rotary",
    "model.rotary_percent": 0.25,
    "model.untie_embeddings_and_output_weights": True,
    "model.parallel_residual": True,
    "model.bias_gelu_fusion": True,
    "model.add_bias_linear": True,
    "model.init_method_std": "small",
    "model.output_init_method_std": "wang",
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "optimizer.lr": 0.97e-3,
    "optimizer.min_lr": 0.97e-4,
    "optimizer.adam_beta2": 0.95,
    "optimizer.adam_eps": 1e-8,
    "optimizer.clip_grad": 0.5,
    "optimizer.weight_decay": 0.2,
    "optimizer.lr_decay_style": "cosine",
    "optimizer.lr_decay_iters": 900,
    "optimizer.lr_warmup_fraction": 0.02,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": None,
    "batch.gradient_accumulation_steps": 3,
    "batch.train_iters": 1000,
    "batch.eval_interval": 200,
    "batch.eval_iters": 7,
    "precision.fp16": True,
    "precision.loss_scale": None,
    "precision.loss_scale_window": 900,
    "precision.initial_loss_scale": 4096.0,
    "precision.hysteresis": 3,
    "precision.min_loss_scale": 2.0,
    "recompute.checkpoint_activations": True,
    "recompute.partition_activations": True,
    "logging.log_interval": 10,
    "checkpoint.save": "runs/neox",
    "checkpoint.load": "runs/neox",
    "checkpoint.save_interval": 100,
    "checkpoint.save_at": (1, 2, 4),
    "checkpoint.keep_latest_checkpoints": 5,
    "tokenizer.tokenizer_type": "PretrainedFromHF",
    "tokenizer.tokenizer_name_or_path": "data/tokenizer.json",
    "data.train_weighted_split_paths": ("train: 2.0 0:1 data/a_text, 1.0 0:1 data/b_text",),
    "data.valid_weighted_split_paths": ("valid: 1 0:1 data/v_text",),
}


def test_two_files_mean_what_they_mean_in_gpt_neox(load):
    loaded = load(MODEL, SETUP)
    assert dict(zip(EXPECTED, read(loaded, *EXPECTED), strict=True)) == EXPECTED
    # The loss is the mean of the microbatches, as there.
    assert read(load(MODEL, f"{SETUP}eod_mask_loss: true"), "loss.loss_mean") == ["microbatch"]


def test_values_have_the_line_of_the_file(load):
    loaded = load(MODEL, SETUP, flags="--num-layers 2")
    assert loaded.origin["model.hidden_size"].endswith("0.yml:7")
    assert loaded.origin["optimizer.adam_beta2"].endswith("0.yml:23")
    assert loaded.origin["tokenizer.tokenizer_name_or_path"].endswith("1.yml:7")
    assert loaded.origin["model.num_layers"] == "--num-layers"
    assert loaded.origin["optimizer.lr_warmup_fraction"] == "derived"


@pytest.mark.parametrize(("ranks", "batch"), [(2, 6), (8, 24)])
def test_the_batch_grows_with_the_ranks(load, ranks: int, batch: int):
    """2 ranks share each matrix. Each data-parallel rank has 3 microbatches of 2 samples."""
    found = plan(load(MODEL, flags="--vocab-size 100"), ranks)
    assert found.errors == ()
    assert found.batch_size.final == batch
    assert found.lr_schedule.warmup_steps == 18 * batch
    assert found.train_samples == 1000 * batch


def test_a_batch_size_of_the_file_must_agree_with_the_steps(load):
    loaded = load(f"{SMALL}train_batch_size: 24\ngas: 3\n", flags="--vocab-size 100")
    assert plan(loaded, 4).errors == ()
    (error,) = plan(loaded, 2).errors
    assert "is 12, and --global-batch-size 24" in error


def test_flags_replace_keys_and_what_follows_from_them(load):
    loaded = load(
        f"{SMALL}gas: 3\ninit_method: wang_init\nactivation: swiglu\nrms_norm_epsilon: 1e-5\n",
        flags="--global-batch-size 8 --lr-warmup-iters 4 --hidden-size 96 --normalization RMSNorm "
        "--weight-decay 0.3",
    )
    assert read(loaded, "batch.gradient_accumulation_steps", "batch.global_batch_size") == [None, 8]
    assert read(loaded, "optimizer.lr_warmup_fraction", "optimizer.weight_decay") == [None, 0.3]
    assert read(loaded, "model.ffn_hidden_size", "model.layernorm_epsilon") == [128, 1e-5]
    assert read(loaded, "model.init_method_std") == [pytest.approx(96**-0.5)]


def test_the_defaults_are_those_of_gpt_neox(load):
    loaded = load(SMALL)
    fields = ("model.hidden_dropout", "optimizer.weight_decay", "model.bias_gelu_fusion")
    assert read(loaded, *fields) == [0.0, 0.1, False]
    fields = ("parallel.zero_stage", "optimizer.lr_warmup_fraction", "model.init_method_std")
    assert read(loaded, *fields) == [0, 0.01, 0.02]
    assert any("the defaults of GPT-NeoX" in warning for warning in loaded.warnings)


MEANINGS: dict[str, dict[str, Any]] = {
    "pos-emb: alibi": {"model.position_embedding_type": "alibi"},
    "pos_emb: learned": {"model.position_embedding_type": "absolute"},
    "norm: rmsnorm": {"model.normalization": "RMSNorm", "model.layernorm_epsilon": 1e-8},
    "num_kv_heads: 2": {"model.num_query_groups": 2},
    "rotary_emb_base: 5e5": {"model.rotary_base": 5e5},
    "activation: geglu\nmlp_multiple_of: 20": {
        "model.glu_activation": "geglu",
        "model.ffn_hidden_size": 80,
    },
    "activation: bilinear\nintermediate_size: 144": {
        "model.glu_activation": "liglu",
        "model.ffn_hidden_size": 48,
    },
    "mlp_type: llama\nuse_bias_in_attn_linear: false": {
        "model.add_bias_linear": False,
        "model.glu_activation": "swiglu",
        "model.ffn_hidden_size": 256,
    },
    "intermediate_size: 100": {"model.ffn_hidden_size": 100, "model.glu_activation": None},
    "expansion_factor: 3.5": {"model.ffn_hidden_size": 168},
    "sliding_window_width: 7": {"model.sliding_window": 8},
    "use_bias_in_attn_linear: false\nuse_bias_in_mlp: false": {"model.add_bias_linear": False},
    "init_method_std: 0.01": {"model.init_method_std": 0.01, "model.output_init_method_std": None},
    "output_layer_init_method: normal": {"model.output_init_method_std": 0.02},
    "init_method: small_init": {"model.output_init_method_std": 0.01},
    "precision: bfloat16": {"precision.bf16": True, "precision.fp16": False},
    "bf16: {enabled: true}": {"precision.bf16": True},
    "fp16: {enabled: true, type: bfloat16}": {"precision.bf16": True, "precision.fp16": False},
    "fp16: {enabled: false}": {"precision.fp16": False},
    "lr_decay_fraction: 0.55": {"optimizer.lr_decay_iters": 55},
    "tokenizer_type: SPMTokenizer\nvocab_file: t.model": {
        "tokenizer.tokenizer_type": "SentencePieceTokenizer",
        "tokenizer.tokenizer_name_or_path": "t.model",
    },
    "vocab_file: v.json\nmerge_file: m.txt": {
        "tokenizer.tokenizer_type": "GPT2BPETokenizer",
        "tokenizer.vocab_file": "v.json",
        "tokenizer.merge_file": "m.txt",
    },
    "tokenizer_type: HFGPT2Tokenizer": {"tokenizer.tokenizer_name_or_path": "gpt2"},
    "data_path: data/x\nsplit: '969, 30, 1'": {"data.data_path": ("data/x",)},
    "checkpoint_factor: 5": {"checkpoint.save_interval": None},
    "use_wandb: true\nwandb_project: big": {
        "logging.tracker": ("wandb",),
        "logging.tracker_project": "big",
    },
    "moe_num_experts: 1\ngpt_j_tied: false\nsparsity_config: {}": {},
}


@pytest.mark.parametrize("text", MEANINGS)
def test_meaning_of_a_key(load, text: str):
    loaded = load(f"{SMALL}{text}\n")
    expected = MEANINGS[text]
    assert dict(zip(expected, read(loaded, *expected), strict=True)) == expected


def test_wang_is_the_deviation_of_the_output_projections(load):
    model = load(f"{SMALL}output_layer_init_method: wang_init\n").config.model
    assert ModelShape(model, 10, 10).output_init_std == pytest.approx(2 / 2 / 48**0.5)
    assert ModelShape(load(SMALL).config.model, 10, 10).output_init_std == 0.01


ERRORS = {
    "rottary_pct: 0.5": ["1.yml:1", "no key 'rottary_pct'", "rotary_pct"],
    "moe_num_experts: 8\nmoe_top_k: 2": ["moe_num_experts: 8", "mixtures of experts"],
    "attention_config: [[[mamba], 2]]\nmamba_use_bias_in_conv: true": ["of the kind mamba"],
    "attention_config: [[[rwkv], 2]]\ndim_att: 3": ["of the kind rwkv"],
    "attention_config: [[[global, local], 1]]": ["of the kind local"],
    "attention_config: flash": ['[[["flash"], 24]]'],
    "train_impl: dpo\npack_impl: unpacked": ["only pretrains"],
    "pos_emb: sinusoidal": ["learned, rotary or alibi"],
    "norm: scalenorm": ["layernorm and rmsnorm"],
    "activation: mish": ["gelu, swiglu"],
    "init_method: xavier_uniform": ["small_init or wang_init"],
    "use_qk_layernorm: true": ["remove it"],
    "use_bias_in_attn_linear: false": ["Give both"],
    "activation: swiglu\nintermediate_size: 101": ["write 303 for a width of 101"],
    "use_mup: true": ["muP"],
    "lr_decay_style: exponential": ["lr_decay_style: exponential", "cosine"],
    "gpt_j_residual: 3": ["gpt_j_residual: 3", "true or false"],
    "zero_optimization: {stage: 1, stages: 2}": ["zero_optimization.stages", "stage"],
    "train_data_paths: [a, b]\ntrain_data_weights: [1]": ["2 data sets"],
    "gpt_j_residual: []": ["gpt_j_residual", "true or false"],
    "expansion_factor: 1e400": ["must be a number"],
    "warmup: soon": ["warmup: soon must be a number"],
    "mlp_multiple_of: 0": ["must be at least 1"],
    "intermediate_size: 1.5": ["must be a whole number"],
    "extra_save_iters: 5": ["must be a list"],
    "train_data_paths: data/x": ["must be a list"],
    "use_bias_in_mlp: 1": ["true or false"],
    "num_layers: 3": ["1.yml:1 gives num_layers again", "0.yml:4"],
    "data_path: !!python/object/apply:os.abort []": ["must not have the tag"],
    "zero_optimization: {stage: !!python/name:os.abort }": ["must not have the tag"],
    "s3_path: &a [x, x]\nuser_script: [*a, *a]": ["1.yml:2", "alias"],
    "save: [": ["1.yml:2 is not YAML"],
    "use_wandb: yes": ["--save"],
}


@pytest.mark.parametrize("text", ERRORS)
def test_a_mistake_gives_one_error(load, write, text: str):
    try:
        loaded = load(SMALL, f"{text}\n", flags="--vocab-size 100")
    except ConfigError as error:
        message = str(error)
        assert "errors in the configuration" not in message
    else:
        (message,) = plan(loaded, 1).errors
    for part in ERRORS[text]:
        assert part in message


def test_a_part_of_a_configuration_names_what_is_missing(fail):
    message = fail(SETUP)
    assert "--num-layers is required" in message
    assert "several files" in message


def test_only_files_of_gpt_neox_are_merged(fail):
    ours = "model: {num_layers: 2}\n"
    assert "only files of GPT-NeoX" in fail(ours, ours)


def test_keys_without_effect_are_reported_once_for_each_reason(load):
    loaded = load(MODEL, SETUP)
    lines = [warning for warning in loaded.warnings if " has no effect" in warning]
    (launcher,) = [line for line in lines if "starts the processes" in line]
    assert all(key in launcher for key in ("launcher", "deepspeed_slurm", "hostfile"))
    (passed,) = [line for line in lines if "DeepSpeed's engine" in line]
    assert "zero_optimization.overlap_comm" in passed
    assert "wall_clock_breakdown" in passed
    # A key that is off asks for nothing.
    assert not any("rope_fusion" in line or "log_dir" in line for line in lines)


def test_a_linear_decay_with_a_floor_warns(load):
    text = f"{SMALL}min_lr: 1e-5\n"
    assert any("linear decay" in warning for warning in load(text).warnings)
    assert not any("linear decay" in w for w in load(f"{text}lr_decay_style: cosine").warnings)


def test_the_plan_reads_the_files(write, capsys: pytest.CaptureFixture[str]):
    words = [*write(MODEL, SETUP), "--vocab-size", "100", "--world-size", "4", "--json"]
    assert plan_tool.main(words) == 0
    assert '"train_iters": 1000' in capsys.readouterr().out


NANOTRON = """
checkpoints: {checkpoint_interval: 10}
general: {project: debug}
model: {model_config: {hidden_size: 16}}
optimizer: {zero_stage: 0}
parallelism: {dp: 2, pp: 2, tp: 2}
tokens: {micro_batch_size: 2}
"""
PICOTRON = """
{"distributed": {"tp_size": 1}, "model": {"name": "x/y"}, "training": {"seed": 42},
 "dataset": {"name": "a/b"}, "checkpoint": {"save_dir": "ckpt"}, "logging": {"use_wandb": false}}
"""


@pytest.mark.parametrize(("trainer", "text"), [("nanotron", NANOTRON), ("picotron", PICOTRON)])
def test_a_file_that_is_not_read_is_named(fail, trainer: str, text: str):
    message = fail(text)
    assert f"a configuration of {trainer}" in message
    assert "docs/migrating.md" in message
    assert "\n" not in message
