"""Reads the configuration that a checkpoint or another rank has written."""

from megatron.base.errors import combine_errors
from megatron.config.fields import ValueWithOrigin, build_config, find_missing
from megatron.config.loss import LOSS_MEAN
from megatron.config.presets import read_chosen_preset
from megatron.config.tree import Config
from megatron.config.yaml_file import read_text


def load_yaml(text: str, *, fast: bool = False) -> Config:
    """Return the configuration that `dump_yaml` wrote.

    Args:
        text: The text.
        fast: See `read_text`.

    Raises:
        ConfigError: the text is not YAML, or has an unknown key, a wrong value or a missing field.
    """
    contents = read_text(text, "<yaml>", fast=fast)
    given, errors = read_chosen_preset(contents.preset)
    given |= contents.given
    # Versions without this field averaged the means of the microbatches.
    given.setdefault(
        LOSS_MEAN, ValueWithOrigin("microbatch", "the configuration of an older version")
    )
    # A text that cannot be parsed gives no values, so each required field would be reported as
    # missing too.
    errors = contents.errors or errors or find_missing(given)
    if errors:
        raise combine_errors(errors)
    return build_config({dotted: item.value for dotted, item in given.items()})
