"""The command line: spellings, precedence, origins and errors."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import tyro
from config.minimal import PUBLISHED_RUNS, REQUIRED, TRAINABLE, check_rules, published_arguments
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from megatron.base.errors import ConfigError
from megatron.config.fields import all_fields
from megatron.config.normalise import list_known_flags
from megatron.config.tree import Config
from megatron.extras.interop.translators.compat import find_rows
from megatron.extras.interop.translators.translator import load_config


def load(*flags: str) -> Config:
    return load_config([*REQUIRED, *flags]).config


def error_of(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*REQUIRED, *flags])
    return str(caught.value)


def test_defaults_and_required_fields():
    loaded = load_config(REQUIRED)
    assert loaded.config.model.hidden_size == 64
    assert loaded.config.optimizer.adam_beta2 == 0.999
    assert set(loaded.origin) == set(all_fields())
    given = {dotted: origin for dotted, origin in loaded.origin.items() if origin != "default"}
    assert given == {
        "model.num_layers": "--num-layers",
        "model.hidden_size": "--hidden-size",
        "model.num_attention_heads": "--num-attention-heads",
        "model.seq_length": "--seq-length",
        "batch.micro_batch_size": "--micro-batch-size",
    }
    assert loaded.warnings == []


def test_argv_is_the_process_command_line_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *REQUIRED, "--seed", "7"])
    assert load_config().config.batch.seed == 7


def test_all_missing_fields_are_named_together():
    with pytest.raises(ConfigError, match="4 errors in the configuration") as caught:
        load_config(["--num-layers", "2"])
    text = str(caught.value)
    for flag in ("--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"):
        assert f"{flag} is required" in text
    assert "--num-layers" not in text
    assert "model.hidden_size in the --config file" in text


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--train-samples 6_000_000", "batch.train_samples", 6_000_000),
        ("--train_samples=6_000_000", "batch.train_samples", 6_000_000),
        ("--deepspeed_config ds.json", "parallel.deepspeed_config", "ds.json"),
        ("--deepspeed-config ds.json", "parallel.deepspeed_config", "ds.json"),
        ("--local-rank=3", "parallel.local_rank", 3),
        ("--local_rank=3", "parallel.local_rank", 3),
        ("--local_rank 3", "parallel.local_rank", 3),
        ("--fp16", "precision.fp16", True),
        ("--no-fp16", "precision.fp16", False),
        ("--fp16=True", "precision.fp16", True),
        ("--fp16=false", "precision.fp16", False),
        ("--no-bias-gelu-fusion", "model.bias_gelu_fusion", False),
        ("--no_bias_gelu_fusion=True", "model.bias_gelu_fusion", False),
        ("--no-bias-gelu-fusion=False", "model.bias_gelu_fusion", True),
        ("--save_optim=False", "checkpoint.save_optim", False),
        ("--rampup-batch-size 192 16 9_765_625", "batch.rampup_batch_size", (192, 16, 9_765_625)),
        ("--rampup-batch-size=192 16 9_765_625", "batch.rampup_batch_size", (192, 16, 9_765_625)),
        ("--data-path 0.5 a 0.5 b", "data.data_path", ("0.5", "a", "0.5", "b")),
        ("--data-path -1 a .5 b", "data.data_path", ("-1", "a", ".5", "b")),
        (
            "--pp-partition-method type:transformer|embedding",
            "parallel.pp_partition_method",
            "type:transformer|embedding",
        ),
        ("--vocab-file=--odd", "tokenizer.vocab_file", "--odd"),
        ("--vocab-file=a=b", "tokenizer.vocab_file", "a=b"),
        ("--init-method-std small", "model.init_method_std", "small"),
        ("--init-method-std 6e-3", "model.init_method_std", 0.006),
        ("--zero-stage 3", "parallel.zero_stage", 3),
        ("--lr 6e-5", "optimizer.lr", 6e-5),
        ("--loss-scale 12", "precision.loss_scale", 12.0),
        ("--glu-activation None", "model.glu_activation", None),
        ("--skip-train-iteration-range None", "batch.skip_train_iteration_range", ()),
    ],
)
def test_spellings_of_flags_and_values(flags: str, field: str, value: object):
    group, _, name = field.partition(".")
    found = getattr(getattr(load(*flags.split()), group), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("flags", "field", "value", "origin"),
    [
        ("--seed 1 --lr 1 --seed 2", "batch.seed", 2, "--seed"),
        ("--fp16 --no-fp16", "precision.fp16", False, "--no-fp16"),
        ("--no-fp16 --fp16", "precision.fp16", True, "--fp16"),
        ("--fp16 --fp16=False", "precision.fp16", False, "--fp16"),
        (
            "--data-path a --data-path 1 b 2 c",
            "data.data_path",
            ("1", "b", "2", "c"),
            "--data-path",
        ),
        ("--data-path 1 b 2 c --data_path a", "data.data_path", ("a",), "--data_path"),
        (
            "--rampup-batch-size 1 2 3 --rampup-batch-size 4 5 6",
            "batch.rampup_batch_size",
            (4, 5, 6),
            "--rampup-batch-size",
        ),
        (
            "--glu-activation geglu --swiglu --ffn-hidden-size 176",
            "model.glu_activation",
            "swiglu",
            "--swiglu",
        ),
        (
            "--swiglu --glu-activation geglu --ffn-hidden-size 176",
            "model.glu_activation",
            "geglu",
            "--glu-activation",
        ),
    ],
)
def test_last_of_several_flags_for_a_field_wins(flags: str, field: str, value: object, origin: str):
    loaded = load_config([*REQUIRED, *flags.split()])
    group, _, name = field.partition(".")
    assert getattr(getattr(loaded.config, group), name) == value
    assert loaded.origin[field] == origin


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hiden-size 3", "unknown flag --hiden-size; perhaps you meant --hidden-size"),
        (
            "--num-lay 3",
            "unknown flag --num-lay; perhaps you meant --num-layers or --num-layers-per-virtual",
        ),
        ("--epochs 3", "unknown flag --epochs; this trainer counts iterations"),
        ("--ranks-per-node 4", "unknown flag --ranks-per-node; the launcher sets them"),
        ("--max_steps 3", "unknown flag --max_steps; here it is --train-iters."),
        ("--output-dir x", "unknown flag --output-dir; here it is --save"),
        ("--resume", "unknown flag --resume; give the same folder to --save"),
        ("--qwertyuiop", "unknown flag --qwertyuiop; --help lists all flags."),
        ("-x", "unknown flag -x; --help lists all flags."),
        ("--fp16 True", "'True' after --fp16 belongs to no flag; write --fp16=True."),
        ("--seed 1 2", "'2' after --seed 1 belongs to no flag."),
        ("--seed", "--seed needs a value; it must be a whole number"),
        ("--seed --lr 1", "--seed needs a value; it must be a whole number"),
        ("--seed 1.5", "--seed 1.5 must be a whole number (as in 2048 or 6_000_000)."),
        ("--lr fast", "--lr fast must be a number (as in 0.1 or 6e-5)."),
        ("--zero-stage 4", "--zero-stage 4 must be one of 0, 1, 2, 3."),
        (
            "--init-method-std tiny",
            "--init-method-std tiny must be a number (as in 0.1 or 6e-5), or one of small,",
        ),
        (
            "--rampup-batch-size 1 2",
            "--rampup-batch-size 1 2 must be 3 values, each a whole number",
        ),
        (
            "--attention-backend by-gpu,flash",
            "--attention-backend by-gpu,flash must be a list, each one of auto, by-gpu, flash, "
            "fused, efficient, unfused; separate the values by spaces.",
        ),
        ("--data-path", "--data-path needs at least one value."),
        ("--seed None", "--seed None must be a whole number"),
        ("--fp16=maybe", "--fp16 maybe must be true or false."),
        ("--config", "--config needs the name of a YAML file."),
        ("--config=", "--config needs the name of a YAML file."),
    ],
)
def test_invalid_command_lines_are_errors(flags: str, message: str):
    assert error_of(*flags.split()).startswith(message)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_quotes_that_the_shell_did_not_remove(quote: str):
    loaded = load_config(
        [*REQUIRED, "--pp-partition-method", f"{quote}type:transformer|embedding{quote}"]
    )
    assert loaded.config.parallel.pp_partition_method == "type:transformer|embedding"
    (warning,) = loaded.warnings
    assert "is read as --pp-partition-method type:transformer|embedding" in warning
    assert "did not remove the quotes" in warning
    for text in ("'", "'a", "a'b", "'a\""):
        assert load_config([*REQUIRED, "--save", text]).config.checkpoint.save == text


def test_value_without_a_flag_is_an_error():
    with pytest.raises(ConfigError, match=r"^'train' belongs to no flag"):
        load_config(["train", *REQUIRED])


def test_values_of_an_unknown_flag_are_no_further_errors():
    assert error_of("--qwertyuiop", "1", "2").count("\n") == 0


def test_all_errors_are_reported_together():
    text = error_of("--qwertyuiop", "--lr", "fast", "--seed", "1", "2", "--config", "/absent.yaml")
    assert text.startswith("4 errors in the configuration:\n  - ")
    for part in (
        "--qwertyuiop",
        "--lr fast",
        "'2' after --seed 1",
        "/absent.yaml cannot be read: No such file",
    ):
        assert part in text


def test_help_prints_and_exits(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        load_config(["--bogus", "--help"], prog="pretrain_gpt.py")
    assert caught.value.code == 0
    assert "usage: pretrain_gpt.py" in capsys.readouterr().out


@pytest.mark.parametrize("run", PUBLISHED_RUNS)
def test_command_lines_of_published_runs_are_read(run: str):
    arguments = published_arguments(run)
    loaded = load_config(arguments)
    expected = ["--abort-on-unmet-fused-kernel-constraints"] if run == "tr11-176B-ml" else []
    expected.append("--deepspeed-activation-checkpointing")
    assert [warning.split()[0] for warning in loaded.warnings] == expected
    assert check_rules(loaded.config, loaded.origin)[0] == []
    # Plain tyro reads the same flags to the same configuration.
    ours = [word for word in arguments if word in list_known_flags() or not find_rows(word)]
    assert loaded.config == tyro.cli(Config, args=ours, config=(tyro.conf.OmitArgPrefixes,))


def _convert(read: Callable[[], object]) -> object:
    """Return the value and its type, or the class of errors for a text that is no value."""
    try:
        value = read()
    except ValueError:
        return ValueError
    # NaN does not equal itself.
    return repr(value)


def test_texts_are_converted_as_tyro_does():
    """tyro prints --help, so a value must mean the same to both."""
    texts = ["2048", "6_000_000", " 7", "-1", "1e3", "0.5", "nan", "-inf", "0x10", "", "True"]
    for field in all_fields().values():
        if field.is_bool:
            continue
        info = PrimitiveTypeInfo.make(field.annotation, set())
        spec = ConstructorRegistry.get_primitive_spec(info)
        assert not isinstance(spec, UnsupportedTypeAnnotationError), field
        assert spec.nargs == field.arity, field
        for text in [*texts, *map(str, _list_literals(field.annotation))]:
            words = [text] * (3 if field.arity == "*" else field.arity)
            expected = _convert(partial(spec.instance_from_str, words))
            assert _convert(partial(field.convert, words)) == expected, (field, text)


def _list_literals(annotation: object) -> list[object]:
    """Return the values of the literals in a type."""
    inner = [value for part in get_args(annotation) for value in _list_literals(part)]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else inner


def test_flags_have_priority_over_the_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  num_layers: 8\n  hidden_size: 128\nbatch: {seed: 5, eval_iters: 7}\n"
    )
    loaded = load_config(
        [*TRAINABLE[4:], "--num-layers", "3", "--config", str(file), "--seed", "6"]
    )
    assert loaded.config.model.num_layers == 3
    assert loaded.config.model.hidden_size == 128
    assert loaded.config.batch.seed == 6
    assert loaded.config.batch.eval_iters == 7
    assert loaded.origin["model.num_layers"] == "--num-layers"
    assert loaded.origin["model.hidden_size"] == f"{file}:3"
    assert loaded.origin["batch.seed"] == "--seed"
    assert loaded.origin["batch.eval_iters"] == f"{file}:4"
    assert loaded.origin["batch.micro_batch_size"] == "--micro-batch-size"
    assert loaded.origin["batch.eval_interval"] == "default"


def test_a_file_that_comes_first_needs_no_config_flag(tmp_path: Path):
    path = tmp_path / "run.yml"
    path.write_text("model: {num_layers: 2, hidden_size: 32}\n")
    flags = ["--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "1"]
    first = load_config([str(path), *flags])
    assert first == load_config(["--config", str(path), *flags])
    assert first == load_config([f"--config={path}", *flags])
    assert first == load_config([*flags, f"--config={path}"])
    assert first.config.model.hidden_size == 32
    with pytest.raises(ConfigError, match="belongs to no flag"):
        load_config([*flags, str(path)])


def test_no_arguments_give_an_example_that_is_valid():
    with pytest.raises(ConfigError, match="no arguments were given") as caught:
        load_config([])
    example = next(line for line in str(caught.value).splitlines() if "pretrain_gpt.py" in line)
    assert load_config(example.split()[2:]).warnings == []


def test_configuration_is_frozen():
    config = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3  # type: ignore[misc]


def test_reading_the_configuration_does_not_import_torch():
    code = """if True:
        import sys
        from megatron.extras.interop.translators.translator import load_config

        load_config(sys.argv[1:])
        sys.exit("torch" in sys.modules)
    """
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, *REQUIRED], check=True, cwd=root)


def load_strategy(flags: str) -> tuple[int, str | None]:
    config = load_config([*REQUIRED, *flags.split()]).config
    return config.parallel.zero_stage, config.parallel.sharding_strategy


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (1, None)),
        ("--sharding-strategy fsdp", (3, "fsdp")),
        ("--sharding_strategy=hsdp", (3, "hsdp")),
        ("--sharding_strategy HSDP", (3, "hsdp")),
        ("--sharding-strategy ddp", (0, "ddp")),
        # A rule refuses this.
        ("--sharding-strategy fsdp --zero-stage 1", (1, "fsdp")),
    ],
)
def test_a_sharding_strategy_sets_the_zero_stage(
    flags: str, expected: tuple[int, str | None]
) -> None:
    assert load_strategy(flags) == expected


@pytest.mark.parametrize("module", ["pretrain", "plan"])
def test_help_ends_quietly_with_its_reader(module: str):
    command = f"{sys.executable} -m megatron.commands.{module} --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""
