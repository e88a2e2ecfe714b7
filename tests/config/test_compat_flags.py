"""Flags of other systems are the same here, renamed, harmless or refused."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from config.minimal import REQUIRED, check_rules

from megatron.base.errors import ConfigError
from megatron.config.compare import load_yaml
from megatron.config.fields import LoadedConfig, all_fields
from megatron.config.normalise import list_known_flags
from megatron.config.presets import read_preset
from megatron.config.yaml_file import dump_yaml
from megatron.data.blend import parse_shares
from megatron.extras.interop.translators import compat
from megatron.extras.interop.translators.compat import (
    NEOX_KEYS,
    SYSTEMS,
    TABLE,
    Row,
    find_row,
    find_rows,
)
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

FOREIGN = Path(__file__).resolve().parents[1] / "fixtures" / "foreign_flags"
SOURCES = (
    *("bigscience", "microsoft", "fms_fsdp", "megatron_lm", "llm_baselines", "swiss_ai"),
    *("bigcode", "llm_jp"),
)

NOT_ALONE = {
    "--quick-geglu": "Give all three",
    "--glu-linear-offset": "Give all three",
    "--activation-func-clamp-value": "Give all three",
    "--window-size": "must be N,0",
}
"""Derived flag -> part of its error without the flags that belong to it."""

OTHER_ARITY = {
    "--rampup-batch-size": "any number in Megatron, which reads three",
    "--num-experts": "one value in Megatron-LM, any number in Microsoft's fork",
    "--profile": "no value in Megatron-LM, one in Microsoft's fork",
    "--profile-steps": "one text with two numbers",
    "--window-size": "one text with two numbers",
    "--window-attn-skip-freq": "a number, or a list as text",
    "--data-path": "one folder of fms-fsdp; one path or a mixture here",
    "--attention-backend": "one value in Megatron-LM; one or more here",
    "--cp-comm-type": "one value, or one for each layer in Megatron-LM",
    "--tracker": "one tracker of fms-fsdp; one or more here",
    "--moe-router-load-balancing-type": "one or more in Megatron-LM; one here",
    "--moe-aux-loss-coeff": "one or more in Megatron-LM; one here",
}


def load(*flags: str) -> LoadedConfig:
    return load_config([*REQUIRED, *flags])


def error_of(*flags: str) -> str:
    """Return the error of a command line, or an empty text if it has none."""
    try:
        load(*flags)
    except ConfigError as error:
        return str(error)
    return ""


def foreign_flags(source: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (flag with hyphens, number of values, choices) for each flag of a source."""
    for line in (FOREIGN / f"{source}.txt").read_text().splitlines():
        if not line.startswith("#"):
            flag, arity, *choices = line.split()
            yield flag.replace("_", "-"), arity, choices


def values_of(row: Row) -> list[str]:
    """Return values that the row's flag accepts."""
    if row.only:
        return [row.only[0]]
    names = [word for word in row.to if word.startswith("--")]
    field = list_known_flags()[names[-1]] if names else None
    # A renamed boolean with a value is turned on by the flag alone.
    if row.arity == 1 and field is not None and field.is_bool:
        return []
    number = field is not None and field.annotation in (int, float)
    # --init-method-std takes a number or a word.
    number = number or row.flag == "--init-std"
    count = 1 if row.arity == "*" else row.arity
    return ["3" if number else "word"] * count


def needed_flags(row: Row) -> list[str]:
    """Return the flags that the row needs."""
    if row.flag == "--swiglu":
        # Otherwise the width is computed, with a second warning.
        return ["--ffn-hidden-size", "176"]
    return {
        "": [],
        "model.num_query_groups": ["--num-query-groups", "2"],
        "model.position_embedding_type": ["--position-embedding-type", "alibi"],
        "tokenizer.vocab_size": ["--vocab-size", "100"],
    }[row.needs]


def of_kind(kind: str) -> pytest.MarkDecorator:
    named = [
        pytest.param(row, id=" ".join([row.flag, *row.only]))
        for row in TABLE
        if kind in (row.kind, "any")
    ]
    return pytest.mark.parametrize("row", named)


def spell(row: Row, values: list[str]) -> list[str]:
    """Return the words of a flag with these values. One that takes none may have one attached."""
    if values and row.arity == 0:
        return [f"{row.flag}={values[0]}"]
    return [row.flag, *values]


def spell_new_flags(row: Row) -> list[str]:
    """Return the flags that the row's flag is read as.

    A preset is spelled as the flags of its fields without the sequence length. The row's flag
    replaces what was given before it, and --preset itself replaces only defaults.
    """
    if row.to[0] != "--preset":
        return list(row.to)
    words = []
    for dotted, item in read_preset(row.to[1]).values.items():
        field = all_fields()[dotted]
        if field.is_bool:
            words.append(field.flag if item.value else field.negative_flag)
        elif dotted != "model.seq_length":
            words += [field.flag, str(item.value)]
    return words


@of_kind("renamed")
def test_renamed_flags_set_what_their_new_name_sets(row: Row):
    values = values_of(row)
    passed = [] if row.only else values
    old = load(*needed_flags(row), *spell(row, values))
    new = load(*needed_flags(row), *spell_new_flags(row), *passed)
    assert old.config == new.config
    (warning,) = without_defaults(old.warnings)
    assert warning.startswith(" ".join([row.flag, *values]))
    assert f" is read as {' '.join([*row.to, *passed])}" in warning
    assert row.needs or row.reason in warning
    assert without_defaults(new.warnings) == []


def without_defaults(warnings: list[str]) -> list[str]:
    """Return the warnings without the one that another trainer's defaults are not used."""
    return [text for text in warnings if "are not used for flags that are not given" not in text]


@of_kind("harmless")
def test_harmless_flags_warn_once_and_change_nothing(row: Row):
    values = values_of(row)
    flags = spell(row, values)
    # A value that the flag did not take would be an error.
    loaded = load(*needed_flags(row), *flags, *flags, "--seed", "7")
    assert loaded.config == load(*needed_flags(row), "--seed", "7").config
    (warning,) = without_defaults(loaded.warnings)
    assert warning.startswith(" ".join([row.flag, *values, "has no effect"]))
    assert row.reason in warning


@of_kind("refused")
def test_refused_flags_are_errors_with_the_reason(row: Row):
    flags = [row.flag, *values_of(row)]
    error = error_of(*flags)
    assert error.startswith(" ".join(flags))
    assert row.reason in error


@of_kind("derived")
def test_derived_flags_warn_and_set_nothing_alone(row: Row):
    # A row of any number of values reads texts that only its own rule knows.
    values = list(row.only[:1]) or ["2"] * (row.arity == 1)
    if row.flag in NOT_ALONE:
        assert NOT_ALONE[row.flag] in error_of(row.flag, *values)
        return
    loaded = load(*needed_flags(row), row.flag, *values)
    assert any(row.reason in warning for warning in loaded.warnings)
    if not row.only and row.arity == 1:
        assert "must be a number above 0" in error_of(row.flag, "word")
        # A row of its own may allow 0.
        if find_row(row.flag, ["0"]) is row:
            assert "must be a number above 0" in error_of(row.flag, "0")


@of_kind("any")
def test_table_is_consistent(row: Row):
    assert "_" not in row.flag
    assert row.kind == "renamed" or row.reason
    assert (row.kind == "renamed") == bool(row.to)
    known = [*list_known_flags(), "--preset"]
    assert all(word in known for word in row.to if word.startswith("--"))
    assert not row.reason.endswith(".")
    if row.flag.endswith("*"):
        own = [flag for flag in list_known_flags() if flag.startswith(row.flag.removesuffix("*"))]
        assert not any(row in find_rows(flag) for flag in own), "a family hides a flag of ours"
    assert len({other.arity for other in TABLE if other.flag == row.flag}) == 1
    assert find_row(row.flag, values_of(row)) is row, "another row is found before this one"


@pytest.mark.parametrize(
    "flag", ["--sgd-momentum", "--sgd-sign-update", "--use-flash-attn-v2", "--n-embd"]
)
def test_a_field_that_a_row_would_hide_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch):
    """A new field --sgd-momentum was accepted, and had no effect."""
    field = next(iter(all_fields().values()))
    known = list_known_flags() | {flag: field}
    monkeypatch.setattr(compat, "list_known_flags", lambda: known)
    compat._index_by_flag.cache_clear()
    try:
        with pytest.raises(AssertionError, match=f"^{flag} is a flag of this trainer"):
            find_rows("--seed")
    finally:
        compat._index_by_flag.cache_clear()


def test_values_of_own_flags_without_effect_are_known():
    """Whoever adds such a field decides whether the value means the same here. Then add it."""
    harmless = {row.flag: row.only for row in TABLE if row.kind == "harmless"}
    assert {flag: only for flag, only in harmless.items() if flag in list_known_flags()} == {
        "--num-experts": ("1",),
        "--ademamix-beta3-warmup": ("-1",),
        "--ademamix-alpha-warmup": ("-1",),
        "--bos-token": ("None",),
        "--eos-token": ("None",),
        "--strip-tokens": ("",),
    }


def test_own_names_without_effect_in_files_of_neox_are_known():
    """Whoever adds such a field decides whether it is that of GPT-NeoX. Then add it or its row."""
    harmless = {row.flag for row in NEOX_KEYS if row.kind == "harmless"}
    assert {key for key in harmless if f"--{key}" in list_known_flags()} == {
        # GPT-NeoX reads these in the blocks of DeepSpeed.
        *("lr", "clip-grad", "zero-stage", "hysteresis", "loss-scale", "loss-scale-window"),
        *("local-rank", "deepspeed", "eval-tasks"),
    }


def test_no_flag_belongs_to_two_systems():
    """The two meanings of such a flag could not be distinguished."""
    flags = [{row.flag for row in table} for table in SYSTEMS.values()]
    assert sum(map(len, flags)) == len(set().union(*flags))


# ---- The lists of the other systems ----


@pytest.mark.parametrize("source", SOURCES)
def test_every_flag_of_the_other_system_is_known(source: str):
    flags = [flag for flag, _, _ in foreign_flags(source)]
    assert (
        len(flags)
        == {
            "bigscience": 189,
            "microsoft": 321,
            "fms_fsdp": 65,
            "megatron_lm": 595,
            "llm_baselines": 185,
            "swiss_ai": 28,
            "bigcode": 13,
            "llm_jp": 7,
        }[source]
    )
    assert [flag for flag in flags if flag not in list_known_flags() and not find_rows(flag)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_flags_take_as_many_values_as_in_the_other_system(source: str):
    for flag, arity, _ in foreign_flags(source):
        if rows := find_rows(flag):
            # A family takes all values that follow.
            if rows[0].flag.endswith("*"):
                continue
            ours = rows[0].arity
        elif flag in list_known_flags():
            ours = list_known_flags()[flag].arity
        else:
            continue
        assert str(ours) == arity or flag in OTHER_ARITY, flag


_BOTH = {
    "--optimizer": ["sgd"],
    "--dataloader-type": ["cyclic"],
    "--remote-device": ["cpu", "nvme"],
}
_BERT = ["BertWordPieceLowerCase", "BertWordPieceCase"]
REFUSED_CHOICES = {
    "bigscience": _BOTH | {"--tokenizer-type": _BERT, "--data-impl": ["lazy", "cached"]},
    "microsoft": _BOTH
    | {
        "--tokenizer-type": [
            *_BERT,
            "NullTokenizer",
        ],
        "--weight-decay-incr-style": ["linear", "cosine"],
        "--distributed-backend": ["ccl", "hccl"],
        "--DDP-impl": ["FSDP"],
        "--bert-embedder-type": ["megatron", "huggingface"],
        "--vision-pretraining-type": ["classify", "inpaint", "dino"],
        "--vision-backbone-type": ["vit", "mit", "swin"],
        "--swin-backbone-type": ["tiny", "base", "h3"],
        "--mask-type": ["random", "row"],
    },
    "megatron_lm": {
        "--fp8-recipe": ["delayed", "mxfp8", "blockwise"],
        "--fp4-format": ["e2m1"],
        "--fp4-recipe": ["nvfp4"],
        "--bert-embedder-type": ["megatron", "huggingface"],
        "--position-embedding-type": ["yarn", "mrope", "relative", "none"],
        "--weight-decay-incr-style": ["linear", "cosine"],
        "--optimizer": ["sgd", "lion", "soap", "adaptive_muon"],
        "--dataloader-type": ["cyclic", "external"],
        "--tokenizer-type": [
            *_BERT,
            *("TikTokenizer", "MultimodalTokenizer", "NullTokenizer", "NullMultimodalTokenizer"),
            "SFTTokenizer",
        ],
        "--vision-pretraining-type": ["classify", "inpaint", "dino"],
        "--vision-backbone-type": ["vit", "mit", "swin"],
        "--swin-backbone-type": ["tiny", "base", "h3"],
        "--mask-type": ["random", "row"],
        "--ckpt-convert-format": ["torch", "torch_dist", "zarr"],
        "--main-params-dtype": ["fp16"],
        "--exp-avg-dtype": ["fp16", "fp8"],
        "--exp-avg-sq-dtype": ["fp16", "fp8"],
        "--rope-type": ["yarn"],
        "--moe-router-dtype": ["fp64"],
        "--moe-router-load-balancing-type": ["sinkhorn", "quantile_balancing"],
        "--moe-token-dispatcher-type": ["flex"],
    },
    "llm_baselines": {
        "--scheduler": ["cos_inf"],
        "--decay-type": ["exp", "miror_cosine", "square"],
        "--opt": [
            *("sgd", "muon", "soap", "lion", "sf-adamw", "sf-sgd", "signsgd"),
            *("signum", "prodigy", "sophiag", "adopt", "mars", "adafactor", "lamb", "scion"),
            *("scion-light", "d-muon", "muon-pytorch"),
        ],
        "--model": ["mup_gpt", "mup_llama"],
        "--tokenizer": ["mistral"],
        "--weight-decay-scheduler": ["linear", "cos", "stable-decay", "wsd"],
        "--attention-type": ["random_block"],
    },
    "swiss_ai": {},
    "llm_jp": {"--tokenizer-type": ["Llama3Tokenizer"]},
    "bigcode": {"--tokenizer-type": ["TokenizerFromFile", "TokenizerFromFileWithFIM"]},
    "fms_fsdp": {
        "--model-variant": ["mamba_9.8b"],
        "--file-type": ["auto"],
        "--tracker": ["aim"],
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_choice_is_accepted_or_refused_by_name(source: str):
    refusals: dict[str, list[str]] = {}
    for flag, _, choices in foreign_flags(source):
        for choice in choices:
            if error := error_of(flag, choice):
                assert error.startswith(f"{flag} {choice}"), error
                refusals.setdefault(flag, []).append(choice)
    assert refusals == REFUSED_CHOICES[source]


MICROSOFT_LLAMA = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --micro-batch-size 1
    --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048 --train-iters
    250000 --save ckpt --load ckpt --data-path my_text_document --data-impl mmap
    --tokenizer-model llama --split 949,50,1 --distributed-backend nccl --lr 3e-4
    --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters
    2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval
    10000 --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling
    --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings
    --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm
    --disable-bias-linear --num-key-value-heads 32 --recompute-granularity full
    --recompute-method uniform --zero-stage=1 --vocab-size 32000 --tokenizer-type
"""
"""The flags of Microsoft's examples_deepspeed/pretrain_llama2_distributed.sh, without DeepSpeed's.

The shape is that of the 7B model.
"""


def test_launch_script_of_microsoft():
    loaded = load_config([*shlex.split(MICROSOFT_LLAMA), "GPTSentencePieceTokenizer"])
    assert loaded.config.tokenizer.tokenizer_type == "SentencePieceTokenizer"
    assert loaded.config.tokenizer.tokenizer_name_or_path == "llama"
    loaded = load_config([*shlex.split(MICROSOFT_LLAMA), "HFTokenizer"])
    errors, (warning,) = check_rules(loaded.config, loaded.origin)
    assert errors == []
    assert "--max-position-embeddings 2048 has no effect" in warning
    plan = resolve(loaded.config, 8, loaded.origin)
    assert plan.errors == ()
    assert plan.parameters == 6_738_415_616
    assert [warning.split()[0] for warning in loaded.warnings] == [
        *(
            "--tokenizer-model",
            "--no-query-key-layer-scaling",
            "--use-rotary-position-embeddings",
            "--swiglu",
            "--normalization",
        ),
        *(
            "--disable-bias-linear",
            "--num-key-value-heads",
            "--recompute-granularity",
            "--recompute-method",
            "--tokenizer-type",
        ),
    ]


# ---- fms-fsdp ----

LAUNCH_SCRIPT = """
    --ckpt_load_path=/lustre/pretrain/ckpt --ckpt_save_path=/lustre/pretrain/ckpt
    --data_path=/lustre/tokens/llama2 --fsdp_activation_checkpointing=False
    --selective_checkpointing=1 --sharding_strategy=hsdp --low_cpu_fsdp=False --batch_size=2
    --report_interval=200 --checkpoint_interval=20000 --use_torch_compile=False
    --use_profiler=False
"""
"""The flags of fms-fsdp's scripts/train.sh without --use_dummy_dataset.

The rest of its configuration has default values.
"""
DEFAULTS = "--model_variant=7b --seq_length=4096 --num_steps=1000000 --learning_rate=3e-4"


def load_fms(*flags: str) -> LoadedConfig:
    return load_config([*shlex.split(DEFAULTS), *shlex.split(LAUNCH_SCRIPT), *flags])


def test_launch_script_of_fms_fsdp():
    loaded = load_fms("--use_dummy_dataset=False")
    config = loaded.config
    assert config.checkpoint.load == "/lustre/pretrain/ckpt"
    assert config.checkpoint.save == "/lustre/pretrain/ckpt"
    assert config.batch.micro_batch_size == 2
    assert config.batch.train_iters == 1_000_000
    assert config.optimizer.lr == 3e-4
    assert config.logging.log_interval == 200
    assert config.checkpoint.save_interval == 20_000
    assert config.parallel.zero_stage == 3
    assert config.parallel.sharding_strategy == "hsdp"
    assert config.recompute.checkpoint_activations is False
    assert not config.kernels.use_torch_compile
    assert check_rules(config, loaded.origin) == ([], [])
    assert resolve(config, 128, loaded.origin).parameters == 6_738_415_616
    assert [warning.split()[0] for warning in loaded.warnings] == [
        *(
            "--model_variant",
            "--num_steps",
            "--learning_rate",
            "--ckpt_load_path",
            "--ckpt_save_path",
        ),
        *(
            "--fsdp_activation_checkpointing",
            "--selective_checkpointing",
            "--low_cpu_fsdp",
            "--batch_size",
        ),
        *("--report_interval", "--checkpoint_interval", "--use_profiler", "--use_dummy_dataset"),
        # The defaults of fms-fsdp, and then what follows from them.
        *("the", "--min-lr", "--lr-warmup-iters", "--lr-warmup-style", "--lr-decay-from-start"),
        "--strip-tokens",
    ]


def test_a_zero_stage_replaces_the_default_strategy_of_fms_fsdp():
    parallel = load_config([*shlex.split(DEFAULTS)]).config.parallel
    assert (parallel.sharding_strategy, parallel.zero_stage) == ("hsdp", 3)
    parallel = load_config([*shlex.split(DEFAULTS), "--zero-stage", "1"]).config.parallel
    assert (parallel.sharding_strategy, parallel.zero_stage) == (None, 1)


def test_a_boolean_of_fms_fsdp_may_have_its_value_behind_it():
    attached = "--fsdp_activation_checkpointing=True --mixed_precision=False --low_cpu_fsdp=True "
    attached += "--use_torch_compile=False --sharding_strategy=fsdp"
    apart = attached.replace("=", " ")
    assert load_fms(*apart.split()).config == load_fms(*attached.split()).config
    with pytest.raises(ConfigError, match=r"^'maybe' after --mixed_precision belongs to no flag"):
        load_fms("--mixed_precision", "maybe")


@pytest.mark.parametrize("value", ["=True", "=true", " True", ""])
def test_dummy_data_is_mock_data(value: str):
    loaded = load_fms(*f"--use_dummy_dataset{value}".split())
    assert loaded.config.data.mock_data
    _, warnings = check_rules(loaded.config, loaded.origin)
    assert any("has no effect with --mock-data" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("variant", "parameters"),
    [  # as the models' owners count them
        ("7b", 6_738_415_616),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_34b", 33_743_970_304),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama3_8b_4k", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
    ],
)
def test_model_variants_have_the_published_size(variant: str, parameters: int):
    others = shlex.split("--seq_length=4096 --batch_size=1 --num_steps=10 --learning_rate=1")
    loaded = load_config([*others, f"--model_variant={variant}"])
    assert check_rules(loaded.config, loaded.origin) == ([], [])
    plan = resolve(loaded.config, 1, loaded.origin)
    assert plan.parameters == parameters
    assert plan.padded_vocab_size == plan.vocab_size


def test_flag_after_the_variant_wins():
    config = load_config(
        [*REQUIRED, "--model_variant=llama3_8b", "--num-layers", "2", "--vocab_size", "256"]
    ).config
    assert config.model.num_layers == 2
    assert config.model.hidden_size == 4096
    assert config.tokenizer.vocab_size == 256


@pytest.mark.parametrize(
    ("given", "fraction"),
    [
        ("1", "1"),
        ("1/2", "1/2"),
        ("2/3", "2/3"),
        ("0.5", "0.5"),
        ("2", "1/2"),
        ("3", "1/3"),
        ("4", "1/4"),
    ],
)
def test_selective_checkpointing_by_number_and_by_fraction(given: str, fraction: str):
    loaded = load_fms("--fsdp_activation_checkpointing=True", f"--selective_checkpointing={given}")
    assert loaded.config.recompute.checkpoint_fraction == fraction
    assert check_rules(loaded.config, loaded.origin)[0] == []


# ---- Values ----


def test_other_values_of_a_flag_with_one_harmless_value_are_errors():
    with pytest.raises(
        ConfigError, match=r"^--dataloader-type cyclic: only single is possible here"
    ):
        load("--dataloader-type", "cyclic")
    with pytest.raises(
        ConfigError, match=r"^--recompute-granularity: only full or selective is possible here"
    ):
        load("--recompute-granularity")


def test_single_values_of_a_known_flag_are_renamed():
    loaded = load("--position-embedding-type", "rope")
    assert loaded.config.model.position_embedding_type == "rotary"
    (warning,) = loaded.warnings
    assert "is read as --position-embedding-type rotary" in warning
    assert load("--position-embedding-type", "alibi").warnings == []


def test_boolean_that_takes_a_value_in_another_system():
    assert load("--eval-only", "True").config.batch.eval_only
    assert not load("--eval-only", "False", "--seed", "1").config.batch.eval_only
    assert load("--eval-only", "--seed", "1").config.batch.eval_only
    assert load("--eval-only").warnings == []


def test_bare_flag_of_another_system_with_true_or_false():
    assert load("--mixed_precision=True").config.precision.bf16
    assert not load("--bf16", "--mixed_precision=False").config.precision.bf16
    both = load(
        "--no-bias-gelu-fusion", "--no-add-bias-linear", "--disable-bias-linear=False"
    ).config.model
    assert both.add_bias_linear
    assert both.bias_gelu_fusion


@pytest.mark.parametrize(
    "flag", ["--random-ltd", "--openai-gelu", "--group-query-attention", "--no-position-embedding"]
)
def test_refused_or_harmless_flag_that_is_off_needs_nothing(flag: str):
    loaded = load(f"{flag}=False")
    assert loaded.config == load().config
    (warning,) = loaded.warnings
    assert warning.startswith(f"{flag} False has no effect")


@pytest.mark.parametrize(
    "flag",
    [
        "--swiglu=False",
        "--disable-bias-linear=maybe",
        "--use_flash_attn=3",
        "--random-ltd=no",
        "--openai-gelu=foo",
    ],
)
def test_other_values_of_a_bare_flag_are_errors(flag: str):
    with pytest.raises(ConfigError, match="must be true, or left out"):
        load("--ffn-hidden-size", "176", flag)


def test_flag_that_needs_another_one():
    with pytest.raises(ConfigError, match=r"^--group-query-attention needs --num-query-groups"):
        load("--group-query-attention")
    needs_positions = r"^--no-position-embedding needs --position-embedding-type"
    with pytest.raises(ConfigError, match=needs_positions):
        load("--no-position-embedding")
    rotary = load("--no-position-embedding", "--use-rotary-position-embeddings")
    assert rotary.config.model.position_embedding_type == "rotary"
    # In Megatron this command line would train without any positions.
    with pytest.raises(ConfigError, match=needs_positions):
        load("--no-position-embedding", "--position-embedding-type", "absolute")


def test_width_of_swiglu_is_that_of_megatron():
    # int(4 x 4096 x 2 / 3 / 64) x 64
    loaded = load("--swiglu", "--hidden-size", "4096")
    assert loaded.config.model.ffn_hidden_size == 10_880
    assert any("--ffn-hidden-size is 10880" in warning for warning in loaded.warnings)
    assert load("--swiglu", "--ffn-hidden-size", "176").config.model.ffn_hidden_size == 176
    assert load("--glu-activation", "swiglu").config.model.ffn_hidden_size is None


@pytest.mark.parametrize("masks", ["--eod-mask-loss", "--goldfish-loss"])
def test_mean_of_the_loss(masks: str, tmp_path: Path):
    """A command line of another trainer keeps its mean over microbatches."""
    file = tmp_path / "ds_config.json"
    file.write_text("{}")
    json_flags = ("--deepspeed-config", str(file))
    yaml = tmp_path / "run.yaml"
    yaml.write_text("loss: {loss_mean: step}\n")

    def load_mean(*flags: str) -> tuple[str, str]:
        loaded = load(masks, *flags)
        return loaded.config.loss.loss_mean, loaded.origin["loss.loss_mean"]

    assert load_mean() == ("step", "default")
    assert load_mean("--use-flash-attn")[0] == "microbatch"
    assert load_mean("--optimizer", "dist_muon") == (
        "microbatch",
        "as in the trainer that has the flag --optimizer dist_muon",
    )
    assert load_mean(*json_flags)[0] == load_mean("--deepspeed", *json_flags)[0] == "microbatch"
    assert load_mean("--deepspeed")[0] == "step"
    per_token = "--calculate-per-token-loss"
    assert load_mean(per_token) == ("step", per_token)
    assert load_mean("--use-flash-attn", *json_flags, per_token) == ("step", per_token)
    assert load_mean("--use-flash-attn", "--config", str(yaml)) == ("step", f"{yaml}:1")
    assert load_mean("--loss-mean", "microbatch") == ("microbatch", "--loss-mean")
    # It has an effect, so no message denies it.
    assert load(masks, per_token).warnings == [f"{per_token} is read as --loss-mean step."]


def test_version_without_the_mean_of_the_loss():
    text = dump_yaml(load().config)
    assert load_yaml(text).loss.loss_mean == "step"
    older = text.replace('  loss_mean: "step"\n', "")
    assert older != text
    assert load_yaml(older).loss.loss_mean == "microbatch"


def test_a_family_covers_flags_without_a_row():
    (warning,) = load("--moe-of-tomorrow", "1", "2").warnings
    assert "--moe-of-tomorrow 1 2 has no effect here: it is a setting of experts" in warning
    assert "muP is not supported" in error_of("--mup-of-tomorrow")


def test_settings_of_experts_are_refused_only_with_experts():
    line = ["--moe-of-tomorrow", "1", "--moe-expert-capacity-factor", "2", "--moe-router-topk", "1"]
    warnings = " ".join(load(*line).warnings)
    assert "--moe-expert-capacity-factor 2 has no effect here" in warnings
    error = error_of(*line, "--num-experts", "4")
    assert "--moe-of-tomorrow 1, --moe-expert-capacity-factor 2 would change" in error
    loaded = load("--num-experts", "4", "--moe-router-topk", "1", "--moe-grouped-gemm")
    assert (loaded.config.model.num_experts, loaded.config.model.moe_router_topk) == (4, 1)
    assert "--expert-tensor-parallel-size 2 is not possible here" in error_of(
        "--num-experts", "4", "--expert-tensor-parallel-size", "2"
    )


def test_refusals_with_one_reason_are_one_message_and_come_first():
    error = error_of("--unknown-flag", "--fp4-format", "e2m1", "--mup", "--fp4-wgrad")
    first, second, third = error.splitlines()[1:]
    assert "--fp4-format e2m1, --fp4-wgrad are not possible here: fp4 is" in first
    assert "--mup is not possible here" in second
    assert "unknown flag --unknown-flag" in third


def test_null_tokenizer_reserves_an_id():
    loaded = load("--tokenizer-type", "NullTokenizer", "--vocab-size", "128256")
    assert loaded.config.tokenizer.vocab_size == 128_257
    assert any("one for the end of a document" in warning for warning in loaded.warnings)


def test_virtual_stages_are_converted_to_layers():
    flags = shlex.split("--num-layers 16 --pipeline-model-parallel-size 2")
    loaded = load(*flags, "--num-virtual-stages-per-pipeline-rank", "4")
    assert loaded.config.parallel.num_layers_per_virtual_pipeline_stage == 2
    error = error_of(*flags, "--num-virtual-stages-per-pipeline-rank", "3")
    assert "must divide --num-layers 16" in error


def test_virtual_stages_that_account_for_the_embedding_and_the_loss():
    flags = shlex.split(
        "--num-layers 70 --pipeline-model-parallel-size 6 --num-virtual-stages-per-pipeline-rank 2"
    )
    embedding = "--account-for-embedding-in-pipeline-split"
    loss = "--account-for-loss-in-pipeline-split"
    parallel = load(*flags, embedding, loss).config.parallel
    assert parallel.num_layers_per_virtual_pipeline_stage == 6
    assert parallel.pp_partition_method == "type:transformer|embedding"
    assert load(embedding, loss).config.parallel.pp_partition_method is None
    assert f"or give {embedding} and {loss}" in error_of(*flags)
    assert "Give both or none" in error_of(*flags, loss)


def test_ulysses_of_deepspeed_is_context_parallelism_that_exchanges_heads():
    parallel = load(
        "--ds-sequence-parallel-size", "4", "--force-ds-sequence-parallel"
    ).config.parallel
    assert (parallel.context_parallel_size, parallel.cp_comm_type) == (4, "a2a")
    assert (
        load("--ds-sequence-parallel-size", "1", "--use-mpi").config.parallel.cp_comm_type != "a2a"
    )


# ---- Defaults of other systems ----


def test_defaults_of_fms_fsdp_fill_an_incomplete_command_line():
    loaded = load_config([*shlex.split(LAUNCH_SCRIPT), "--use_dummy_dataset=False"])
    config = loaded.config
    assert (config.model.num_layers, config.model.hidden_size) == (32, 4096)
    assert (config.optimizer.lr, config.optimizer.adam_beta2) == (3e-4, 0.95)
    assert config.optimizer.min_lr == pytest.approx(3e-5)
    assert config.optimizer.lr_warmup_iters == 2000
    assert config.batch.micro_batch_size == 2
    assert config.precision.bf16
    assert config.checkpoint.save_interval == 20_000
    assert any("the defaults of fms-fsdp are used" in warning for warning in loaded.warnings)
    assert resolve(config, 128, loaded.origin).errors == ()
    # A model that is described in this trainer's words gets none of them.
    incomplete = ["--num-layers", "2", "--learning_rate=3e-4"]
    with pytest.raises(ConfigError, match="--hidden-size is required"):
        load_config(incomplete)


ARROW = {
    "dataset_format": "arrow",
    "col_name": "tokens",
    "bos_token": None,
    "eos_token": 0,
    "strip_tokens": "0",
    "logical_shards": 1024,
    "weights": "7725,500,550,28,17,22,25,8,100,500,175,250,100",
}
PARQUET = {
    "dataset_format": "parquet",
    "col_name": "text",
    "bos_token": 1,
    "eos_token": 2,
    "strip_tokens": "1,2",
    "logical_shards": 64,
}
NOTHING_STREAMED = {
    "dataset_format": None,
    "datasets": None,
    "weights": None,
    "eos_token": None,
    "strip_tokens": None,
    "logical_shards": 256,
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ARROW),
        ("--datasets=web,code", {**ARROW, "datasets": "web,code", "weights": None}),
        ("--datasets=web --weights=1", {**ARROW, "datasets": "web", "weights": "1"}),
        (
            "--file_type=hf_parquet --col_name=text --bos_token=1 --eos_token=2 "
            "--logical_shards=64",
            PARQUET,
        ),
        ("--strip_tokens=5 --eos_token=None", {**ARROW, "eos_token": None, "strip_tokens": "5"}),
        ("--use_dummy_dataset=True", NOTHING_STREAMED),
    ],
)
def test_defaults_of_the_loader_of_fms_fsdp(flags: str, expected: dict):
    loaded = load_config(["--num_steps=100", "--data_path=/lustre/tokens", *flags.split()])
    assert {name: getattr(loaded.config.data, name) for name in expected} == expected
    assert check_rules(loaded.config, loaded.origin)[0] == []


def test_the_default_data_sets_of_fms_fsdp():
    shares = parse_shares(
        load_config(["--num_steps=100", "--data_path=/lustre/tokens"]).config.data
    )
    assert len(shares) == 13
    assert shares["lang=en/dataset=commoncrawl"] == pytest.approx(0.7725)


def test_indexed_data_beside_flags_of_fms_fsdp():
    words = ["--num_steps=100", "--train-weighted-split-paths", "train: 1 0:0.9 data/a"]
    loaded = load_config(words)
    assert {
        name: getattr(loaded.config.data, name) for name in NOTHING_STREAMED
    } == NOTHING_STREAMED
    assert check_rules(loaded.config, loaded.origin)[0] == []


def test_annealing_of_fms_fsdp_has_neither_warmup_nor_floor():
    optimizer = load_config(["--num_steps=100", "--training_stage=annealing"]).config.optimizer
    assert optimizer.lr_decay_style == "linear"
    assert (optimizer.min_lr, optimizer.lr_warmup_iters) == (0.0, 0)


LLM_BASELINES_RUN = """
    --config_format base --model llama --n_embd 1024 --n_head 16 --n_layer 10 --batch_size 64
    --acc_steps 4 --sequence_length 512 --iterations 16000 --warmup_percent 0.02 --lr 1e-3
    --weight_decay 1e-1 --grad_clip 1.0 --dataset slimpajama --wandb --wandb_project p
    --eval_freq 200 --data_path data --opt adamw --dtype bfloat16 --compile
"""


LLM_BASELINES_RUN_WITHOUT_LENGTH = "--n_layer 2 --n_head 2 --n_embd 64 --data_path data"


def test_command_line_of_llm_baselines():
    loaded = load_config(shlex.split(LLM_BASELINES_RUN))
    config = loaded.config
    assert check_rules(config, loaded.origin)[0] == []
    plan = resolve(config, 1, loaded.origin)
    assert plan.errors == ()
    # V h + l (4 h^2 + 3 h f) + (2 l + 1) h, with f = 2816 and tied embeddings
    assert plan.parameters == 50_304 * 1024 + 10 * (4 * 1024**2 + 3 * 1024 * 2816) + 21 * 1024
    assert config.batch.global_batch_size == 256
    assert config.optimizer.lr_warmup_fraction == 0.02
    assert config.optimizer.min_lr == pytest.approx(1e-5)
    assert config.optimizer.adam_beta2 == 0.95
    assert config.model.hidden_dropout == 0.0
    assert config.kernels.use_torch_compile
    assert config.precision.bf16
    # The batch is that of all ranks, so more ranks than it has samples for are an error.
    assert resolve(config, 4, loaded.origin).errors == ()
    assert "--global-batch-size 256" in resolve(config, 8, loaded.origin).errors[0]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("", (False, True)),
        ("--dtype float16", (True, False)),
        ("--dtype float32", (False, False)),
        ("--fp16", (True, False)),
        ("--no-fp16", (False, True)),
    ],
)
def test_default_of_llm_baselines_replaces_no_precision(dtype, expected):
    words = f"--n_layer 2 --n_head 2 --n_embd 64 {dtype}"
    precision = load_config(words.split()).config.precision
    assert (precision.fp16, precision.bf16) == expected


def test_base_model_of_llm_baselines_is_no_llama():
    words = shlex.split(f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} --model base")
    model = load_config(words).config.model
    assert (model.normalization, model.glu_activation) == ("LayerNorm", None)
    assert model.position_embedding_type == "absolute"
    assert model.ffn_hidden_size is None
    assert not model.add_bias_linear


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-warmup-fraction 0.1",
        "--lr-warmup-fraction 0",
        "--lr-warmup-tokens 1024",
        "--train-samples 5000 --lr-warmup-samples 500",
    ],
)
def test_default_length_of_llm_baselines_yields_to_another_unit(flags):
    loaded = load_config(shlex.split(f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} {flags}"))
    assert check_rules(loaded.config, loaded.origin)[0] == []
    assert loaded.config.optimizer.lr_warmup_iters == 0


def compute_wsd_factor(step: int, scale: float, style: str) -> float:
    """Return llm-baselines' factor of 200 steps, 30 of warm-up and 54 of decay."""
    if step < 30:
        return step / 30 + (1 - step / 30) / 100
    if step < 146:
        return 1.0
    done = (step - 146) / 54
    shapes = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) * 0.5,
        "sqrt": 1 - math.sqrt(done),
    }
    return scale + (1 - scale) * shapes[style]


@pytest.mark.parametrize(
    ("flags", "scale", "style"),
    [
        ("", 0.0, "linear"),
        ("--wsd_final_lr_scale 0 --decay_type linear", 0.0, "linear"),
        ("--wsd_final_lr_scale 0.05 --decay_type cosine", 0.05, "cosine"),
        ("--wsd_final_lr_scale 0.3 --decay_type sqrt", 0.3, "sqrt"),
    ],
)
def test_wsd_of_llm_baselines_is_its_schedule(flags: str, scale: float, style: str) -> None:
    loaded = load_config(
        shlex.split(
            f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} --iterations 200 --warmup_steps 30 --lr 2e-3 "
            f"--batch_size 3 --scheduler wsd --wsd_fract_decay 0.27 {flags}"
        )
    )
    plan = resolve(loaded.config, 1, loaded.origin)
    assert plan.errors == ()
    for step in range(200):
        rate = plan.lr_schedule.get_lr(3 * step)
        assert rate == pytest.approx(2e-3 * compute_wsd_factor(step, scale, style), abs=1e-12)


def test_default_decay_of_llm_baselines_is_a_tenth() -> None:
    words = shlex.split(f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} --scheduler wsd")
    optimizer = load_config(words).config.optimizer
    assert optimizer.lr_wsd_decay_iters == 1500
    assert optimizer.min_lr == 0.0
    assert optimizer.lr_warmup_init == pytest.approx(1e-5)


def test_ademamix_of_llm_baselines_has_its_defaults() -> None:
    words = shlex.split(f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} --opt ademamix")
    optimizer = load_config(words).config.optimizer
    assert optimizer.optimizer == "ademamix"
    assert (optimizer.ademamix_beta3, optimizer.ademamix_alpha) == (0.9, 2.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    words += shlex.split("--adema_beta3 0.999 --adema_alpha 8 --adema_beta3_warmup 5")
    optimizer = load_config([*words, "--adema_alpha_warmup", "7"]).config.optimizer
    assert (optimizer.ademamix_beta3, optimizer.ademamix_alpha) == (0.999, 8.0)
    assert (optimizer.ademamix_beta3_warmup, optimizer.ademamix_alpha_warmup) == (5, 7)


@pytest.mark.parametrize("opt", ["muon", "d-muon", "muon-pytorch"])
def test_muon_of_llm_baselines_is_refused_with_the_nearest(opt: str) -> None:
    error = error_of("--opt", opt)
    assert "queries, keys and values are one matrix there" in error
    assert "--muon-coefficient-type simple" in error


def test_embeddings_of_llm_baselines_have_no_weight_decay() -> None:
    for model in ("", "--model base", "--model llama"):
        words = shlex.split(f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} {model}")
        assert not load_config(words).config.optimizer.weight_decay_on_embeddings


def test_warmup_of_fms_fsdp_yields_to_another_unit():
    loaded = load_config(["--num_steps=100", "--data-path", "data", "--lr-warmup-fraction", "0.1"])
    assert check_rules(loaded.config, loaded.origin)[0] == []
    assert loaded.config.optimizer.lr_warmup_iters == 0


def test_flags_of_llm_baselines_beside_those_of_this_trainer_bring_no_defaults():
    assert (
        load("--beta2", "0.95", "--seed", "7").config
        == load("--adam-beta2", "0.95", "--seed", "7").config
    )
    assert load("--iterations", "9").config == load("--train-iters", "9").config


def test_underscores_and_attached_values():
    assert load("--batch_size=3").config.batch.micro_batch_size == 3
    (warning,) = load("--use_flash_attn=True").warnings
    assert warning.startswith("--use_flash_attn True has no effect here")
    assert load("--override_opt_param-scheduler").config.optimizer.override_lr_scheduler


def test_file_of_flags_of_llm_baselines(tmp_path: Path):
    path = tmp_path / "noam_wide.yaml"
    path.write_text(
        "model: llama\nn_layer: 10\nn_head: 16\nn_embd: 1024\nacc_steps: 4\nlr: 2e-3\n"
        "compile: true\nwandb: false\nresume_from: null\nwarmup_percent: 0.02\n"
    )
    loaded = load_config(["--config", str(path), "--batch_size", "64", "--lr", "1e-3"])
    config = loaded.config
    assert (config.model.num_layers, config.model.hidden_size) == (10, 1024)
    assert config.batch.global_batch_size == 256
    assert config.optimizer.lr == 1e-3
    assert config.kernels.use_torch_compile
    assert config.checkpoint.load is None


@pytest.mark.parametrize("line", ["config: other.yaml", "data_path: [[1, 2]]"])
def test_file_of_flags_with_what_is_no_flag_is_an_error(line: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(f"n_layer: 2\nn_head: 2\nn_embd: 64\n{line}\n")
    with pytest.raises(ConfigError, match=line.split(":")[0]):
        load_config(["--config", str(path)])


def test_file_without_groups_and_foreign_flags_is_still_an_error(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("num_layers: 10\nhidden_size: 16\n")
    with pytest.raises(ConfigError, match="write it under its group: model"):
        load_config(["--config", str(path)])


def test_flags_of_muon_and_ademamix_of_megatron_are_read() -> None:
    optimizer = load(
        *["--optimizer", "dist_muon", "--muon-momentum", "0.95", "--muon-tp-mode", "distributed"],
        *["--muon-scalar-optimizer", "adam", "--muon-use-syrk", "--muon-num-ns-steps", "7"],
    ).config.optimizer
    assert optimizer.optimizer == "muon"
    assert (optimizer.muon_momentum, optimizer.muon_num_ns_steps) == (0.95, 7)
    assert "whole matrices" in error_of("--muon-tp-mode", "blockwise")
    assert "three matrices" in error_of("--muon-no-split-qkv")
    assert "AdamW" in error_of("--muon-scalar-optimizer", "lion")
    apertus = load(
        *["--optimizer", "ademamix", "--ademamix-alpha", "8", "--ademamix-beta3", "0.9999"],
        *["--ademamix-beta3-warmup", "100000", "--ademamix-alpha-warmup", "-1"],
        *["--lr-decay-style", "WSD", "--lr-wsd-decay-style", "1-sqrt"],
    ).config.optimizer
    assert apertus.ademamix_beta3_warmup == 100_000
    assert apertus.ademamix_alpha_warmup is None
    assert apertus.lr_wsd_decay_style == "minus_sqrt"


# ---- Profilers ----


@pytest.mark.parametrize(
    ("flags", "iterations", "ranks"),
    [
        # nsys records what starts after step 10, up to and including step 12.
        ("--profile", "11-12", (0,)),
        (
            "--profile --profile-step-start 0 --profile-step-end 3 --profile-ranks 1 2",
            "1-3",
            (1, 2),
        ),
        # torch.profiler.schedule(wait=9, warmup=1, active=2), whose step is called before each
        # iteration.
        ("--profile --use-pytorch-profiler", "10-11", (0,)),
        ("--profile --use-pytorch-profiler --profile-step-end 20", "10-19", (0,)),
        ("--profile pt", "2-3", (-1,)),
        ("--profile pt-full --profile_steps 5,9 --profile-ranks 0", "5-9", (0,)),
        # torch.profiler.schedule(wait=1, warmup=2, active=3), whose step is called after each.
        ("--use_profiler", "4-6", (0,)),
        ("--use_profiler=True --profiler_rank0_only=False", "4-6", (-1,)),
        ("--use_profiler=False --profiler_rank0_only=True", None, (0,)),
        ("--profile-step-start 3 --use-pytorch-profiler", None, (0,)),
    ],
)
def test_profilers_record_the_same_iterations(
    flags: str, iterations: str | None, ranks: tuple[int, ...]
):
    logging = load("--save", "run", *flags.split()).config.logging
    assert logging.profile_iterations == iterations
    assert logging.profile_ranks == ranks


def test_the_folder_of_fms_fsdp_is_kept():
    assert load("--use_profiler").config.logging.profile_dir == "profile_traces"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile --profile-step-start 12", "--profile-step-end 12 must be above"),
        ("--profile pt --profile-steps 2", "--profile-steps 2 must be FIRST,LAST"),
        ("--profile nsys", "--profile nsys must be"),
    ],
)
def test_steps_that_no_profiler_records_are_errors(flags: str, message: str):
    assert message in error_of(*flags.split())


SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 4 --lr 1e-3 "
)


@pytest.mark.parametrize(
    ("flags", "tracker", "project"),
    [
        ("--wandb-project p --save out", ("wandb",), "p"),
        ("--wandb-project p", (), "p"),
        ("--wandb-project= --save out", (), "megatron-3d"),
        ("--wandb --save out", ("wandb",), "megatron-3d"),
        ("--wandb=False --save out", (), "megatron-3d"),
        ("--use_wandb=True --wandb_project_name=p --save out", ("wandb",), "p"),
        ("--wandb-project p --tracker trackio --save out", ("trackio",), "p"),
    ],
)
def test_flags_of_weights_and_biases_are_its_tracker(flags, tracker, project):
    loaded = load_config(shlex.split(SHAPE + flags))
    assert loaded.config.logging.tracker == tracker
    assert loaded.config.logging.tracker_project == project


def test_project_alone_is_no_tracker_in_llm_baselines():
    words = f"{LLM_BASELINES_RUN_WITHOUT_LENGTH} --results_base_folder out --wandb_project p"
    assert load_config(words.split()).config.logging.tracker == ()
    assert load_config([*words.split(), "--wandb"]).config.logging.tracker == ("wandb",)


def test_vocabulary_of_pai_megatron_patch_is_that_of_its_tokenizer():
    flags = "--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256 --train-mode pretrain"
    loaded = load_config(shlex.split(f"{SHAPE}{flags} --dataset MMAP --max-padding-length 128"))
    assert loaded.config.tokenizer.vocab_size == 128256
    with pytest.raises(ConfigError, match="use --tokenizer-type"):
        load_config(shlex.split(SHAPE + "--patch-tokenizer-type ChatGLMTokenizerFromHF"))
    with pytest.raises(ConfigError, match="fine-tuning is not supported"):
        load_config(shlex.split(SHAPE + "--train-mode finetune"))


def test_pipeline_of_the_first_scripts():
    size = "parallel.pipeline_model_parallel_size"
    for given, stages in (("0", 1), ("2", 2)):
        loaded = load_config(shlex.split(f"{SHAPE}--pipe-parallel-size {given}"))
        assert loaded.config.parallel.pipeline_model_parallel_size == stages
        assert loaded.origin[size] == "--pipe-parallel-size"


def test_gradients_in_bf16_are_fp32_here_and_a_warning_says_so():
    loaded = load_config(shlex.split(SHAPE + "--main-grads-dtype bf16 --fsdp-manual-registration"))
    assert any("accumulated in fp32, which is more exact" in text for text in loaded.warnings)
    with pytest.raises(ConfigError, match="its range is too small for moments"):
        load_config(shlex.split(SHAPE + "--exp-avg-sq-dtype fp8"))


def test_a_native_shape_drops_the_defaults_of_another_trainer_with_a_warning():
    """One --num-layers among the flags of fms-fsdp changed 20 defaults without a message."""
    loaded = load_config(shlex.split(SHAPE + "--num_steps=100"))
    (warning,) = [text for text in loaded.warnings if "are not used" in text]
    assert "--num-steps is a flag of fms-fsdp, but --num-layers gives the shape" in warning
    assert loaded.config.optimizer.lr_decay_style != "cosine"
    own = load_config(["--num_steps=100", "--model_variant=7b"])
    assert not any("are not used" in text for text in own.warnings)


def test_mup_of_megatron_is_a_parametrization() -> None:
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--use-mup"]
    model = load(*shape, "--mup-output-mult", "1.0").config.model
    assert (model.parametrization, model.base_width, model.base_kv_channels) == ("mup", 64, 1)
    given = load(*shape, "--mup-base-head-dim", "8.0", "--mup-base-hidden-size", "16")
    model = given.config.model
    assert (model.base_width, model.base_kv_channels) == (16, 8)
    assert any("weight decay of the layers' matrices rises" in each for each in given.warnings)
