"""Flags of other systems are the same here, renamed, harmless or refused."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from config.minimal import REQUIRED

from megatron.config.cli import LoadedConfig, load_config
from megatron.config.compat import SYSTEMS, TABLE, find_row, find_rows
from megatron.config.compat_row import Row
from megatron.config.normalise import list_known_flags
from megatron.config.rules import check_rules
from megatron.errors import ConfigError
from megatron.plan import resolve

FOREIGN = Path(__file__).resolve().parents[1] / "fixtures" / "foreign_flags"
SOURCES = ("bigscience", "microsoft", "fms_fsdp")

OTHER_ARITY = {
    "--rampup-batch-size": "any number in Megatron, which reads three",
    "--data-path": "one folder of fms-fsdp; one path or a mixture here",
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
    number = names and list_known_flags()[names[-1]].annotation in (int, float)
    count = 1 if row.arity == "*" else row.arity
    return ["3" if number else "word"] * count


def needed_flags(row: Row) -> list[str]:
    """Return the flags that the row needs."""
    return {
        "": [],
        "model.num_query_groups": ["--num-query-groups", "2"],
        "model.position_embedding_type": ["--position-embedding-type", "alibi"],
        "model.ffn_hidden_size": ["--ffn-hidden-size", "176"],
    }[row.needs]


def of_kind(kind: str) -> pytest.MarkDecorator:
    named = [
        pytest.param(row, id=" ".join([row.flag, *row.only]))
        for row in TABLE
        if kind in (row.kind, "any")
    ]
    return pytest.mark.parametrize("row", named)


@of_kind("renamed")
def test_renamed_flags_set_what_their_new_name_sets(row: Row):
    values = values_of(row)
    passed = [] if row.only else values
    old = load(*needed_flags(row), row.flag, *values)
    new = load(*needed_flags(row), *row.to, *passed)
    assert old.config == new.config
    (warning,) = old.warnings
    assert warning.startswith(" ".join([row.flag, *values]))
    assert f" is read as {' '.join([*row.to, *passed])}" in warning
    assert row.needs or row.reason in warning
    assert new.warnings == []


@of_kind("harmless")
def test_harmless_flags_warn_once_and_change_nothing(row: Row):
    flags = [row.flag, *values_of(row)]
    # A value that the flag did not take would be an error.
    loaded = load(*needed_flags(row), *flags, *flags, "--seed", "7")
    assert loaded.config == load(*needed_flags(row), "--seed", "7").config
    (warning,) = loaded.warnings
    assert warning.startswith(" ".join([*flags, "has no effect"]))
    assert row.reason in warning


@of_kind("refused")
def test_refused_flags_are_errors_with_the_reason(row: Row):
    flags = [row.flag, *values_of(row)]
    error = error_of(*flags)
    assert error.startswith(" ".join(flags))
    assert row.reason in error


@of_kind("any")
def test_table_is_consistent(row: Row):
    assert "_" not in row.flag
    assert row.kind == "renamed" or row.reason
    assert (row.kind == "renamed") == bool(row.to)
    assert all(word in list_known_flags() for word in row.to if word.startswith("--"))
    assert not row.reason.endswith(".")
    assert row.flag not in list_known_flags() or row.only, (
        "only single values of a field's own flag may have a row"
    )
    assert len({other.arity for other in TABLE if other.flag == row.flag}) == 1
    assert find_row(row.flag, values_of(row)) is row, "another row is found before this one"


def test_no_flag_belongs_to_two_systems():
    """The two meanings of such a flag could not be distinguished."""
    flags = [{row.flag for row in table} for table in SYSTEMS.values()]
    assert sum(map(len, flags)) == len(set().union(*flags))


# ---- The lists of the other systems ----


@pytest.mark.parametrize("source", SOURCES)
def test_every_flag_of_the_other_system_is_known(source: str):
    flags = [flag for flag, _, _ in foreign_flags(source)]
    assert len(flags) == {"bigscience": 189, "microsoft": 321, "fms_fsdp": 65}[source]
    assert [flag for flag in flags if flag not in list_known_flags() and not find_rows(flag)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_flags_take_as_many_values_as_in_the_other_system(source: str):
    for flag, arity, _ in foreign_flags(source):
        if rows := find_rows(flag):
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
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "NullTokenizer",
        ],
        "--lr-decay-style": ["inverse-square-root"],
        "--weight-decay-incr-style": ["linear", "cosine"],
        "--recompute-method": ["block"],
        "--distributed-backend": ["ccl", "hccl"],
        "--DDP-impl": ["FSDP"],
        "--fp8-amax-compute-algo": ["most_recent", "max"],
        "--bert-embedder-type": ["megatron", "huggingface"],
        "--vision-pretraining-type": ["classify", "inpaint", "dino"],
        "--vision-backbone-type": ["vit", "mit", "swin"],
        "--swin-backbone-type": ["tiny", "base", "h3"],
        "--mask-type": ["random", "row"],
    },
    "fms_fsdp": {
        "--model-variant": ["mamba_9.8b"],
        "--training-stage": ["initial"],
        "--file-type": ["arrow", "hf_parquet", "auto"],
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
    with pytest.raises(
        ConfigError, match=r"^--tokenizer-type GPTSentencePieceTokenizer .*convert the tokenizer"
    ):
        load_config([*shlex.split(MICROSOFT_LLAMA), "GPTSentencePieceTokenizer"])
    loaded = load_config([*shlex.split(MICROSOFT_LLAMA), "HFTokenizer"])
    assert check_rules(loaded.config, loaded.origin) == ([], [])
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
            "--sharding_strategy",
            "--low_cpu_fsdp",
            "--batch_size",
        ),
        *("--report_interval", "--checkpoint_interval", "--use_profiler", "--use_dummy_dataset"),
    ]


@pytest.mark.parametrize("value", ["=True", "=true", ""])
def test_dummy_data_is_refused(value: str):
    with pytest.raises(ConfigError, match=r"^--use_dummy_dataset .*there is no dummy data"):
        load_fms(f"--use_dummy_dataset{value}")


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
    with pytest.raises(ConfigError, match=r"^--swiglu needs --ffn-hidden-size .*8/3 x hidden"):
        load("--swiglu")


def test_underscores_and_attached_values():
    assert load("--batch_size=3").config.batch.micro_batch_size == 3
    (warning,) = load("--use_flash_attn=True").warnings
    assert warning.startswith("--use_flash_attn True has no effect here")
    assert load("--override_opt_param-scheduler").config.optimizer.override_lr_scheduler
