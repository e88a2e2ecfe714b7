"""Reads a run's configuration from a command line and a YAML file, with the origin of each value.

Invariant: precedence is flag, then YAML file, then preset, then default. Only --help ends the
process. All that is wrong is collected into one `ConfigError`. Rules that connect fields are in
`megatron.plan.rules.training`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, combine_errors, leave_out_middle
from megatron.config.fields import (
    LoadedConfig,
    ValueWithOrigin,
    all_fields,
    build_config,
    find_missing,
)
from megatron.config.loss import FOREIGN_ORIGIN, LOSS_MEAN
from megatron.config.normalise import CommandLine, Translator, read_argv
from megatron.config.parallel import STRATEGY_STAGES
from megatron.config.presets import read_chosen_preset
from megatron.config.yaml_file import YamlContents, read_file

FOREIGN_DEFAULT = "'s default"
"""Suffix of the origin of a value that is another system's default."""


_EXAMPLE = (
    "no arguments were given. A small model on one device, with your own data:\n"
    "  python pretrain_gpt.py --data-path data/corpus_text_document "
    "--vocab-file vocab.json --merge-file merges.txt "
    "--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 256 "
    "--micro-batch-size 4 --global-batch-size 8 --train-iters 1000 --lr 1e-3 "
    "--save runs/small --load runs/small --save-interval 200\n"
    "The README makes data and tokenizer from text files. --help lists all flags"
)


def _complete_words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line. A configuration file needs no --config if it is first.

    Raises:
        ConfigError: There are none.
    """
    if not argv:
        raise ConfigError(_EXAMPLE)
    # The first word may also be --config=FILE.
    if argv[0].endswith((".yaml", ".yml")) and not argv[0].startswith("-"):
        return ["--config", *argv]
    return list(argv)


def load_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    translator: Translator | None = None,
) -> LoadedConfig:
    """Read flags (`sys.argv` by default) over the YAML file that --config names and a preset.

    --help prints the help text and exits.

    Args:
        argv: The words.
        prog: Name of the program, for --help.
        translator: Reads flags and files of other trainers. Without one, they are errors.

    Raises:
        ConfigError: The command line has errors, or --help names a group that does not exist. The
            message lists every unknown flag or key, value of a wrong type and missing field.
    """
    line = read_argv(_complete_words(sys.argv[1:] if argv is None else argv), translator)
    if line.help:
        # It imports tyro, which a run does not need.
        from megatron.config.help import print_help

        print_help(prog, line.help_group)
        raise SystemExit(0)
    contents = YamlContents()
    errors = list(line.errors)
    foreign = None
    if translator is not None and line.config_files:
        foreign = translator.read_files(line.config_files)
    if foreign is not None:
        # The files are those of another system. Flags of the command line have priority.
        line = _merge_lines(foreign, line)
        errors = list(line.errors)
    elif line.config_files:
        contents = read_file(line.config_files[0])
        errors += contents.errors
    given, preset_errors = read_chosen_preset(line.preset or contents.preset)
    errors += preset_errors
    # The file replaces values of the preset and their origins, and flags replace those of the file.
    given |= contents.given
    given |= line.given
    warnings = list(line.warnings)
    if translator is not None:
        more_errors, more_warnings = _translate(translator, line, given)
        errors += more_errors
        warnings = list(map(leave_out_middle, [*warnings, *more_warnings]))
    _resolve_sharding_strategy(given)
    _resolve_loss_mean(line, given)
    # As in Megatron-DeepSpeed, 8-bit moments turn the embedding's norm on. `setdefault` keeps
    # --no-embed-layernorm in effect if it was given.
    if _get_value(given, "optimizer.use_bnb_optimizer"):
        given.setdefault(
            "model.embed_layernorm",
            ValueWithOrigin(True, given["optimizer.use_bnb_optimizer"].origin),
        )
    errors += _check_conditions(line, given)
    # Without this check, a typing error in a required flag would be reported twice, once as unknown
    # and once as missing.
    if not errors:
        errors += find_missing(given)
        if errors and translator is not None:
            errors += translator.explain_missing(line)
    if errors:
        raise combine_errors(errors)
    origin = {
        dotted: given[dotted].origin if dotted in given else "default" for dotted in all_fields()
    }
    return LoadedConfig(
        build_config({dotted: item.value for dotted, item in given.items()}), origin, warnings
    )


def _translate(
    translator: Translator, line: CommandLine, given: dict[str, ValueWithOrigin]
) -> tuple[list[str], list[str]]:
    """Add what other systems set themselves to `given`. Return errors and warnings."""
    errors: list[str] = []
    warnings: list[str] = []
    # DeepSpeed's JSON is read after flags and YAML, because its values must agree with theirs.
    # Without --deepspeed the file has no effect, and a rule warns about it.
    if _get_value(given, "parallel.deepspeed"):
        path = _get_value(given, "parallel.deepspeed_config")
        # A missing file is reported by the rules of the plan.
        if path is not None and Path(path).exists():
            from_json, errors, warnings = translator.merge_json(path, given)
            given |= from_json
    # The values that other systems compute from several flags, and their defaults, come last,
    # because they never replace a value. Flags of this trainer alone cause none.
    if line.typed:
        filled, fill_errors, fill_warnings = translator.fill(line, given)
        given |= filled
        errors = [*errors, *fill_errors]
        warnings = [*warnings, *fill_warnings]
    return errors, warnings


def _resolve_sharding_strategy(given: dict[str, ValueWithOrigin]) -> None:
    """Set --zero-stage to what --sharding-strategy means, in place.

    A stage that was given as well is kept, and a rule compares both. It replaces a strategy that is
    only another system's default.
    """
    strategy = given.get("parallel.sharding_strategy")
    if strategy is None or strategy.value is None:
        return
    if "parallel.zero_stage" not in given:
        stage = STRATEGY_STAGES[strategy.value]
        given["parallel.zero_stage"] = ValueWithOrigin(stage, strategy.origin)
    elif strategy.origin.endswith(FOREIGN_DEFAULT):
        del given["parallel.sharding_strategy"]


def _resolve_loss_mean(line: CommandLine, given: dict[str, ValueWithOrigin]) -> None:
    """Set --loss-mean for the command line of another trainer, in place, unless it was given.

    It has an effect only if tokens are masked. A flag that changes no number changes no field.
    """
    if not any(
        _get_value(given, dotted) for dotted in ("data.eod_mask_loss", "loss.goldfish_loss")
    ):
        return
    foreign = line.foreign
    if foreign is None and (path := _get_value(given, "parallel.deepspeed_config")):
        foreign = f"--deepspeed-config {path}"
    if foreign is not None:
        given.setdefault(LOSS_MEAN, ValueWithOrigin("microbatch", f"{FOREIGN_ORIGIN}{foreign}"))


def _merge_lines(below: CommandLine, above: CommandLine) -> CommandLine:
    """Return two command lines as one. Values of `above` take precedence."""
    return CommandLine(
        given=below.given | above.given,
        preset=above.preset or below.preset,
        typed=below.typed | above.typed,
        foreign=above.foreign or below.foreign,
        conditions=[*below.conditions, *above.conditions],
        warnings=list(dict.fromkeys([*below.warnings, *above.warnings])),
        errors=[*below.errors, *above.errors],
    )


def _check_conditions(line: CommandLine, given: Mapping[str, ValueWithOrigin]) -> list[str]:
    """Return an error for each flag that is not possible with the other fields.

    The fields may come from the YAML file or the JSON, so `read_argv` cannot check this.
    """
    errors = []
    for shown, needed, reason in line.conditions:
        field = all_fields()[needed]
        if field.dotted not in given or given[field.dotted].value == field.default:
            errors.append(f"{shown} needs {field.flag} as well: {reason}.")
    return errors


def _get_value(given: Mapping[str, ValueWithOrigin], dotted: str) -> Any:
    if dotted in given:
        return given[dotted].value
    return None
