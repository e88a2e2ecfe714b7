"""Rules about times: --train-time and the intervals of evaluations and saves."""

from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.rules.finding import Finding, error
from megatron.schedule.clock import parse_duration

_TIMES = ("batch.train_time", "batch.eval_interval_time", "checkpoint.save_interval_time")
"""Fields that hold a time."""

_BY_TIME = "the learning rate follows the time; leave it out"
_WSD_BY_TIME = "give --lr-wsd-decay-fraction"
_NEEDS_KNOWN_LENGTH = {
    "batch.train_tokens": "the time ends the run; give one of them",
    "optimizer.lr_decay_iters": _BY_TIME,
    "optimizer.lr_decay_samples": _BY_TIME,
    "optimizer.lr_decay_tokens": _BY_TIME,
    "optimizer.lr_wsd_decay_iters": _WSD_BY_TIME,
    "optimizer.lr_wsd_decay_samples": _WSD_BY_TIME,
}
"""Field that contradicts --train-time -> what to do."""


def check_times(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that each time is a number with its unit."""
    for dotted in _TIMES:
        # `check_no_empty_text` reports an empty text.
        if not settings[dotted]:
            continue
        try:
            parse_duration(settings[dotted])
        except ConfigError as failure:
            yield error(f"{settings.describe(dotted)}: {failure}.")


def check_length_by_time(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that with --train-time nothing else gives the end of the run or of the decay."""
    if settings.config.batch.train_time is None:
        return
    time = settings.describe("batch.train_time")
    for dotted, instead in _NEEDS_KNOWN_LENGTH.items():
        if settings[dotted] is not None:
            yield error(f"{settings.describe(dotted)} cannot be combined with {time}; {instead}.")
    if settings["optimizer.lr_warmup_iters"] and settings["optimizer.lr_warmup_samples"]:
        both = settings.describe("optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples")
        yield error(f"{both} both set the length of the warm-up; give one of them.")


def check_one_wsd_decay(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the length of WSD's final decay is given in one unit only."""
    for unit in ("iters", "samples"):
        dotted = f"optimizer.lr_wsd_decay_{unit}"
        if (
            settings[dotted] is not None
            and settings.config.optimizer.lr_wsd_decay_fraction is not None
        ):
            both = settings.describe("optimizer.lr_wsd_decay_fraction", dotted)
            yield error(f"{both} both set the length of the final decay; give one of them.")
