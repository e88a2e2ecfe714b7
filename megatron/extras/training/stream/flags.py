"""What the flags of streamed data request, besides its mixture."""

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.extras.training.stream.filters import Filters


def parse_strip_tokens(data: DataConfig) -> tuple[int, ...]:
    """Return the ids of --strip-tokens.

    Raises:
        ConfigError: the flag is not a list of ids.
    """
    try:
        return tuple(int(each) for each in (data.strip_tokens or "").split(",") if each.strip())
    except ValueError as error:
        raise ConfigError(
            f"--strip-tokens {data.strip_tokens!r} must be ids separated by commas, as in 0,1."
        ) from error


def get_filters(data: DataConfig) -> Filters:
    """Return the filters of the training data."""
    return Filters(data.max_document_tokens, data.max_ngram_repetition, data.drop_duplicates)
