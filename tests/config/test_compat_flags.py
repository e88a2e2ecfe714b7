"""Flags of other scripts: renamed, harmless, refused."""

import pytest
from config.minimal import REQUIRED

from megatron.config.cli import LoadedConfig, load_config
from megatron.config.compat import TABLE, Row
from megatron.config.normalise import known_flags
from megatron.errors import ConfigError


def load(*flags: str) -> LoadedConfig:
    return load_config([*REQUIRED, *flags])


def command(row: Row) -> list[str]:
    """A use of the row's flag, with values that the flag here would take."""
    field = known_flags().get(row.to[0]) if row.to else None
    numbers = "3" if field is not None and field.annotation in (int, float) else "word"
    beside = {"model.num_query_groups": ["--num-query-groups", "2"], "": []}
    beside["model.position_embedding_type"] = ["--position-embedding-type", "alibi"]
    return [*beside[row.needs], row.flag, *(row.only[:1] or [numbers] * row.arity)]


@pytest.mark.parametrize("row", [row for row in TABLE if row.kind == "renamed"], ids=lambda row: " ".join([row.flag, *row.only]))
def test_renamed_flags_do_what_their_new_name_does(row: Row):
    flags = command(row)
    values = [] if row.only else flags[1:]
    old, new = load(*flags), load(*row.to, *values)
    assert old.config == new.config
    assert old.warnings == [f"{' '.join(flags)} is read as {' '.join([*row.to, *values])}{row.reason and ': ' + row.reason}."]
    assert new.warnings == []


@pytest.mark.parametrize("row", [row for row in TABLE if row.kind == "harmless"], ids=lambda row: " ".join([row.flag, *row.only]))
def test_harmless_flags_warn_once_and_change_nothing(row: Row):
    flags = command(row)
    beside = flags[: len(flags) - 1 - row.arity]
    loaded = load(*flags, *flags, "--seed", "7")  # a value that was not consumed would be an error
    assert loaded.config == load(*beside, "--seed", "7").config
    assert loaded.warnings == [f"{' '.join(flags[len(beside) :])} has no effect here: {row.reason}."]


@pytest.mark.parametrize("row", [row for row in TABLE if row.kind == "refused"], ids=lambda row: row.flag)
def test_refused_flags_say_why(row: Row):
    with pytest.raises(ConfigError) as caught:
        load(*command(row))
    assert str(caught.value) == f"{' '.join(command(row))} is not possible here: {row.reason}."


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join([row.flag, *row.only]))
def test_the_table_is_sound(row: Row):
    assert "_" not in row.flag
    assert row.kind == "renamed" or row.reason
    assert (row.kind == "renamed") == bool(row.to)
    assert not row.reason.endswith(".")
    assert row.flag not in known_flags() or row.only, "a field's own flag may only have single values diverted"
    assert len({other.arity for other in TABLE if other.flag == row.flag}) == 1


def test_other_values_of_a_half_harmless_flag_are_errors():
    with pytest.raises(ConfigError, match=r"^--dataloader-type cyclic: only single is possible here; samples come"):
        load("--dataloader-type", "cyclic")
    with pytest.raises(ConfigError, match=r"^--recompute-granularity: only full, selective is possible here"):
        load("--recompute-granularity")


def test_single_values_of_a_known_flag_are_renamed():
    loaded = load("--position-embedding-type", "rope")
    assert loaded.config.model.position_embedding_type == "rotary"
    assert loaded.warnings == ["--position-embedding-type rope is read as --position-embedding-type rotary."]
    assert load("--position-embedding-type", "alibi").warnings == []


def test_a_boolean_that_takes_a_value_elsewhere():
    assert load("--eval-only", "True").config.batch.eval_only
    assert not load("--eval-only", "False", "--seed", "1").config.batch.eval_only
    assert load("--eval-only", "--seed", "1").config.batch.eval_only
    assert load("--eval-only").warnings == []


def test_a_flag_that_needs_another_one():
    with pytest.raises(ConfigError, match=r"^--group-query-attention needs --num-query-groups beside it: "):
        load("--group-query-attention")
    with pytest.raises(ConfigError, match=r"^--no-position-embedding needs --position-embedding-type beside it: "):
        load("--no-position-embedding")
    assert load("--no-position-embedding", "--use-rotary-position-embeddings").config.model.position_embedding_type == "rotary"


def test_underscores_and_attached_values():
    assert load("--batch_size=3").config.batch.micro_batch_size == 3
    assert load("--use_flash_attn=True").warnings[0].startswith("--use_flash_attn True has no effect here")
    assert load("--override_opt_param-scheduler").config.optimizer.override_lr_scheduler
