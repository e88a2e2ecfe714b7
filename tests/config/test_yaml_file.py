"""YAML files: values, line numbers, errors, and the round trip of a configuration."""

import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from config.minimal import REQUIRED, config_with
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import MOST_ERRORS, ConfigError, combine_errors
from megatron.config.compare import load_yaml
from megatron.config.fields import Field, all_fields, build_config
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml, read_text
from megatron.extras.interop.translators.translator import load_config


def load(tmp_path: Path, text: str | bytes) -> Config:
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config([*REQUIRED, "--config", str(file)]).config


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("optimizer: {lr: 1e-4}", "optimizer.lr", 1e-4),  # text to YAML 1.1
        ("optimizer: {lr: 1}", "optimizer.lr", 1.0),
        ("batch: {train_samples: 6_000_000}", "batch.train_samples", 6_000_000),
        ("batch: {seed: 010}", "batch.seed", 10),  # 8 to YAML 1.1
        (
            "batch: {step_batch_size_schedule: 1:30}",
            "batch.step_batch_size_schedule",
            ("1:30",),
        ),  # 90 to YAML 1.1
        (
            "batch: {step_batch_size_schedule: [0:8, 1M:1K]}",
            "batch.step_batch_size_schedule",
            ("0:8", "1M:1K"),
        ),
        (
            "batch: {step_batch_size_schedule: '0:8 1M:1K'}",
            "batch.step_batch_size_schedule",
            ("0:8 1M:1K",),
        ),
        (
            "logging: {codecarbon_country_iso_code: NO}",
            "logging.codecarbon_country_iso_code",
            "NO",
        ),  # false to YAML 1.1
        ("data:\n  split: 949,50,1", "data.split", "949,50,1"),
        ("data: {data_path: [0.5, a, 0.5, b]}", "data.data_path", ("0.5", "a", "0.5", "b")),
        ("data: {data_path: one}", "data.data_path", ("one",)),
        ("data: {data_path: []}", "data.data_path", ()),
        (
            "batch: {rampup_batch_size: [16, 16, 5_000_000]}",
            "batch.rampup_batch_size",
            (16, 16, 5_000_000),
        ),
        (
            "curriculum: {curriculum_difficulties: [8, 1_024]}",
            "curriculum.curriculum_difficulties",
            (8, 1024),
        ),
        ("batch: {rampup_batch_size: null}", "batch.rampup_batch_size", None),
        ("checkpoint: {save: ~}", "checkpoint.save", None),
        ("checkpoint: {save: 'null'}", "checkpoint.save", "null"),
        ("checkpoint: {save: 12}", "checkpoint.save", "12"),
        ("precision: {fp16: true}", "precision.fp16", True),
        ("precision: {fp16: False}", "precision.fp16", False),
        ("precision: {min_loss_scale: .inf}", "precision.min_loss_scale", float("inf")),
        ("precision: {min_loss_scale: +.inf}", "precision.min_loss_scale", float("inf")),
        ("precision: {min_loss_scale: -.INF}", "precision.min_loss_scale", float("-inf")),
        ("model: {init_method_std: small}", "model.init_method_std", "small"),
        ("batch: &b {seed: 5}", "batch.seed", 5),
        ("batch:\n", "batch.seed", 1234),
        ("", "batch.seed", 1234),
    ],
)
def test_values_are_read_as_on_the_command_line(
    tmp_path: Path, text: str, field: str, value: object
):
    group, _, name = field.partition(".")
    found = getattr(getattr(load(tmp_path, text), group), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batch:\n  sead: 3",
            "{}:2 has an unknown key 'batch.sead'; perhaps you meant 'batch.seed'.",
        ),
        (
            "batch: {hidden_size: 3}",
            "{}:1 has an unknown key 'batch.hidden_size'; perhaps you meant 'model.hidden_size'.",
        ),
        (
            "model: {hidden-size: 3}",
            "{}:1 has an unknown key 'model.hidden-size'; perhaps you meant 'model.hidden_size'.",
        ),
        (
            "batch: {qwertyuiop: 3}",
            "{}:1 has an unknown key 'batch.qwertyuiop'; --help lists the batch options.",
        ),
        ("modle: {}", "{}:1 has an unknown group 'modle'; perhaps you meant 'model'."),
        (
            "\nseq_length: 3",
            "{}:2 has an unknown group 'seq_length'; write it under its group: model.seq_length.",
        ),
        ("qwertyuiop: {}", "{}:1 has an unknown group 'qwertyuiop'; the groups are model, batch, "),
        (
            "batch:\n  seed: 1\n  seed: 2",
            "{}:3 gives 'seed' again (first in line 2)",
        ),
        ("batch: {}\nbatch: {}", "{}:2 gives 'batch' again (first in line 1)"),
        ("batch: {[1]: 2}", "{}:1 has a key that is not a word."),
        ("- 1\n- [2]", "{}:1 the file must be a mapping (key: value), and is a list."),
        ("batch: 3", "{}:1 'batch' must be a mapping (key: value), and is text."),
        ("batch: {seed: 1.5}", "batch.seed: '1.5' ({}:1) must be a whole number"),
        (
            "batch: {seed: null}",
            "batch.seed: 'null' ({}:1) must be a whole number (as in 2048 or 6_000_000); leave the",
        ),
        ("batch: {seed: [1]}", "batch.seed: [1] ({}:1) must be a whole number"),
        ("batch: {seed: {a: 1}}", "batch.seed: a mapping ({}:1) must be a whole number"),
        ("batch: {seed: true}", "batch.seed: 'true' ({}:1) must be a whole number"),
        ("precision: {fp16: 1}", "precision.fp16: '1' ({}:1) must be true or false."),
        ("precision: {fp16: yes}", "precision.fp16: 'yes' ({}:1) must be true or false."),
        (
            "checkpoint: {save: true}",
            "checkpoint.save: 'true' ({}:1) must be text; if the text is true, put it in quotes.",
        ),
        (
            "batch: {rampup_batch_size: [1, 2]}",
            "batch.rampup_batch_size: [1, 2] ({}:1) must be 3 values",
        ),
        (
            "curriculum: {curriculum_max_steps: [8, x]}",
            "curriculum.curriculum_max_steps: [8, x] ({}:1) must be a list of whole numbers.",
        ),
        ("data: {data_path: [[a]]}", "data.data_path: [...] ({}:1) must be a list of text."),
        (
            "batch: {seed: !!python/name:os.sep 1}",
            "batch.seed: '1' ({}:1) must be a whole number (as in 2048 or 6_000_000), without",
        ),
        ("model: !include a.yaml", "{}:1 'model' must be a mapping (key: value), and is text."),
        ("model: base\nn_layer: 2\nn_layer: 3", "{}:3 gives 'n_layer' again (first in line 2)"),
        ("batch:\n\tseed: 1", "{}:2 is not YAML: found character"),
        ("config: {}", "{}:1 has an unknown group 'config'"),
        ("batch: {seed: 1e6}", "batch.seed: '1e6' ({}:1) must be a whole number (as in 2048 or"),
        ("batch: [", "{}:1 is not YAML: expected the node content"),
        ("a: 1\n---\nb: 2", "{}:2 is not YAML: but found another document."),
        ("batch: *absent", "{}:1 is not YAML: found undefined alias."),
        ("batch: \x07", "{}:1 is not YAML: unacceptable character #x0007"),
        (b"\xff\xfe\xfa", "--config {} cannot be read: it is not UTF-8 text."),
    ],
)
def test_invalid_files_are_errors_with_their_line(tmp_path: Path, text: str | bytes, message: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(message.format(tmp_path / "run.yaml"))


def test_unreadable_files_are_errors(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"--config .*absent.yaml cannot be read: No such file or directory\."
    ):
        load_config([*REQUIRED, "--config", str(tmp_path / "absent.yaml")])
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\."):
        load_config([*REQUIRED, "--config", str(tmp_path)])


def test_saved_configuration_must_be_complete():
    with pytest.raises(ConfigError, match="--num-layers is required"):
        load_yaml("")
    with pytest.raises(ConfigError, match=r"<yaml>:1 has an unknown group 'x'"):
        load_yaml("x: 1")


def test_saved_configuration_can_be_used_as_config_file(tmp_path: Path):
    config = config_with(
        data_path=("0.5", "a"),
        save="null",
        lr=1e-5,
        rampup_batch_size=(1, 2, 3),
        glu_activation="swiglu",
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config))
    assert load_config(["--config", str(file)]).config == config
    assert load_config(["--config", str(file), "--seed", "9"]).config.batch.seed == 9


def test_pyyaml_reads_the_same_values():
    tree = yaml.safe_load(
        dump_yaml(config_with(lr=1e-5, save="no", split="1:30", data_path=("1", "a")))
    )
    assert tree["optimizer"]["lr"] == 1e-5
    assert tree["checkpoint"]["save"] == "no"
    assert tree["data"]["split"] == "1:30"
    assert tree["data"]["data_path"] == ["1", "a"]


def any_value(field: Field) -> st.SearchStrategy[Any]:
    """Return a strategy for all values of a field's type."""
    values = values_of_type(field.annotation)
    if field.optional:
        return st.none() | values
    return values


def values_of_type(annotation: Any) -> st.SearchStrategy[Any]:
    simple = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    }
    if annotation in simple:
        return simple[annotation]
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        first, second, *_ = get_args(annotation)
        if second is ...:
            return st.lists(values_of_type(first), max_size=3).map(tuple)
        return st.tuples(*map(values_of_type, get_args(annotation)))
    return st.one_of(*map(values_of_type, get_args(annotation)))


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({dotted: any_value(field) for dotted, field in all_fields().items()}).map(
        build_config
    )
)
def test_round_trip_of_any_configuration(config: Config):
    text = dump_yaml(config)
    assert load_yaml(text) == config
    assert load_yaml(text, fast=True) == config


def test_ranks_read_a_path_that_is_not_utf_8():
    """Python has such a byte of the command line as a surrogate, which libyaml refuses."""
    config = load_config([*REQUIRED, "--save", os.fsdecode(b"runs/\xe9")]).config
    assert load_yaml(dump_yaml(config), fast=True) == config


def test_text_with_the_character_nul_is_refused() -> None:
    """Each call that opens such a name would raise a ValueError."""
    contents = read_text('checkpoint: {save: "a\\0b"}\ndata: {data_path: ["a\\0b"]}', "run.yaml")
    assert len(contents.errors) == 2
    assert all("must not have the character NUL" in error for error in contents.errors)


def test_a_file_with_thousands_of_errors_has_a_short_message() -> None:
    keys = "".join(f"  key{number}: {'x' * 90}\n" for number in range(3000))
    contents = read_text(f"model:\n{keys}", "run.yaml")
    assert len(contents.errors) == MOST_ERRORS + 1
    message = str(combine_errors([*contents.errors, "x" * 10**6]))
    assert len(message) < 10**4
    assert message.endswith("and more")
    assert len(str(combine_errors(["x" * 10**6]))) < 10**4
