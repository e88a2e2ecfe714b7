"""Learning rate as a function of progress: a warm-up, and then a decay of a certain style.

Invariant: the rate depends on the samples of *applied* iterations (`lr_samples`), so an iteration
that is skipped does not change it. An iteration uses the rate of the state before it, so with a
warm-up the first one has the rate that the warm-up starts from, which is 0 by default. The log line
shows the rate after the iteration. Fields with "steps" in their name count samples.

Sources:

- Megatron-LM's parameter scheduler.
- Decay by tokens: https://arxiv.org/abs/2108.06084.
- WSD: https://arxiv.org/abs/2404.06395.
- Half a cosine: OLMo-core's HalfCosWithWarmup, whose peak is that of the complete cosine.
- A quadratic warm-up, and a decay that begins with training: fms-fsdp's main_training_llama.py.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, assert_never

from megatron.base.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "half-cosine", "inverse-square-root", "WSD"]
WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WarmupStyle = Literal["linear", "quadratic"]

_DECAYS_FROM_START = ("linear", "cosine", "half-cosine")
"""Styles that fall over the complete decay, so that it may begin before the end of the warm-up."""

FIELD_NAMES = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "style": "--lr-decay-style",
    "warmup_steps": "warm-up in samples (--lr-warmup-samples, -iters, -tokens or -fraction)",
    "decay_steps": "decay in samples (--lr-decay-samples or -iters)",
    "decay_tokens": "--lr-decay-tokens",
    "wsd_decay_steps": "WSD decay in samples (--lr-wsd-decay-samples or -iters)",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "train_seconds": "--train-time in seconds",
    "warmup_fraction": "warm-up as a part of --train-time (--lr-warmup-fraction)",
    "wsd_decay_fraction": "WSD decay as a part of --train-time (--lr-wsd-decay-fraction)",
    "warmup_init": "--lr-warmup-init",
    "warmup_style": "--lr-warmup-style",
    "decay_from_start": "--lr-decay-from-start",
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
}
"""Field of `LRSchedule` -> its name in messages."""


@dataclass(frozen=True)
class LRSchedule:
    """The complete schedule of the learning rate.

    It holds plain numbers, so that `dataclasses.asdict` and `LRSchedule(**d)` convert it to JSON
    and back.

    `warmup_steps`, `decay_steps` and `wsd_decay_steps` are in samples. `warmup_steps` may have a
    fractional part if --lr-warmup-fraction or -tokens gave it. `decay_steps` is the end of the
    decay, counted from the start of training. `wsd_decay_steps` is the length of WSD's final decay.
    If `decay_tokens` is given, the decay ends at this number of tokens and not at `decay_steps`.
    The warm-up is still in samples. `warmup_init` is the rate that the warm-up starts from.
    With `decay_from_start` the decay begins at the start of training and not after the warm-up, and
    the rate is the lower one of both.
    `decoupled_max_lr` and `decoupled_min_lr` are the peak and the minimum of the word embedding and
    the output matrix. They are None if these have the rate of all other parameters.

    With `train_seconds` the decay ends at this time of training, and `decay_steps` has no meaning.
    `warmup_fraction` and `wsd_decay_fraction` are parts of this time. Without `warmup_fraction` the
    warm-up is still in samples.

    Raises:
        ConfigError: the numbers do not give a valid schedule.
    """

    max_lr: float
    min_lr: float
    style: DecayStyle
    warmup_steps: float
    decay_steps: int
    decay_tokens: int | None = None
    wsd_decay_steps: int | None = None
    wsd_decay_style: WSDDecayStyle = "exponential"
    # Checkpoints of earlier versions do not have these three. Their warm-up started from 0, was
    # linear, and came before the decay.
    warmup_init: float = 0.0
    warmup_style: WarmupStyle = "linear"
    decay_from_start: bool = False
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None
    train_seconds: float | None = None
    warmup_fraction: float | None = None
    wsd_decay_fraction: float | None = None

    def __post_init__(self) -> None:
        """Check that the numbers give a valid schedule.

        Raises:
            ConfigError: they do not. It lists all problems.
        """
        problems = self._find_range_problems()
        if self.decoupled_max_lr is not None:
            problems += self._find_decoupled_problems()
        if self.style == "WSD":
            problems += self._find_wsd_problems()
        if problems:
            raise ConfigError("\n".join(problems))

    def _find_range_problems(self) -> list[str]:
        """Return a message for each number that is out of its range."""
        problems = []
        # Another rule reports a peak that is not above 0.
        if self.max_lr > 0 and not 0 <= self.min_lr <= self.max_lr:
            problems.append(f"--min-lr {self.min_lr} must be between 0 and --lr {self.max_lr}.")
        if self.max_lr > 0 and not 0 <= self.warmup_init <= self.max_lr:
            problems.append(
                f"--lr-warmup-init {self.warmup_init} must be between 0 and --lr {self.max_lr}."
            )
        if self.warmup_steps < 0:
            problems.append(
                f"the learning rate's warm-up of {self.warmup_steps} samples must not be "
                "negative; 0 turns it off."
            )
        if self.decay_steps < 1:
            problems.append(
                f"the learning rate's decay ends at {self.decay_steps} samples; it must end at 1 "
                "or later."
            )
        # A decay in tokens or by time has another unit and cannot be compared here.
        elif (
            self.decay_tokens is None
            and self.train_seconds is None
            and self.warmup_steps >= self.decay_steps
        ):
            problems.append(
                f"the learning rate's warm-up of {self.warmup_steps} samples must be shorter than "
                f"its decay, which ends at {self.decay_steps} samples (an iteration counts as the "
                "global batch size); shorten --lr-warmup-* or lengthen --lr-decay-*."
            )
        if self.decay_tokens is not None and self.decay_tokens < 1:
            problems.append(f"--lr-decay-tokens {self.decay_tokens} must be at least 1.")
        if self.decay_from_start and self.style not in _DECAYS_FROM_START:
            problems.append(
                f"--lr-decay-from-start is not possible with --lr-decay-style {self.style}; use "
                f"{', '.join(_DECAYS_FROM_START[:-1])} or {_DECAYS_FROM_START[-1]}."
            )
        if self.train_seconds is not None and (self.warmup_fraction or 0.0) >= 1:
            problems.append(
                f"--lr-warmup-fraction {self.warmup_fraction} must be below 1, because the decay "
                "ends with --train-time."
            )
        return problems

    def _find_decoupled_problems(self) -> list[str]:
        """Return a message for each number of the decoupled rate that is out of its range."""
        if self.decoupled_max_lr is None or self.decoupled_min_lr is None:
            return []
        problems = []
        if not 0 <= self.decoupled_min_lr <= self.decoupled_max_lr:
            problems.append(
                f"--decoupled-min-lr {self.decoupled_min_lr} (--min-lr, unless it is given) must "
                f"be between 0 and --decoupled-lr {self.decoupled_max_lr}."
            )
        if self.warmup_init > self.decoupled_max_lr:
            problems.append(
                f"--lr-warmup-init {self.warmup_init} must be at most --decoupled-lr "
                f"{self.decoupled_max_lr}."
            )
        return problems

    def _find_wsd_problems(self) -> list[str]:
        """Return a message for each setting that WSD cannot use."""
        if self.train_seconds is not None:
            return self._find_timed_wsd_problems()
        if self.decay_tokens is not None:
            return ["--lr-decay-style WSD counts samples; leave out --lr-decay-tokens."]
        if self.wsd_decay_steps is None:
            return [
                "--lr-decay-style WSD needs the length of its final decay: "
                "--lr-wsd-decay-samples, -iters or -fraction."
            ]
        if not 0 <= self.wsd_decay_steps <= self.decay_steps:
            return [
                f"WSD's final decay of {self.wsd_decay_steps} samples (--lr-wsd-decay-samples or "
                f"-iters) must be at least 0 and at most {self.decay_steps}, the end of the decay."
            ]
        return []

    def _find_timed_wsd_problems(self) -> list[str]:
        """Return a message for each setting that WSD by time cannot use."""
        if self.wsd_decay_fraction is None:
            return [
                "--lr-decay-style WSD with --train-time needs the length of its final decay: "
                "--lr-wsd-decay-fraction."
            ]
        if self.wsd_decay_fraction + (self.warmup_fraction or 0.0) > 1:
            return [
                f"--lr-wsd-decay-fraction {self.wsd_decay_fraction} and --lr-warmup-fraction "
                f"{self.warmup_fraction} must not exceed 1 together."
            ]
        return []

    def check_decay_after_warmup(self) -> None:
        """Check that WSD's final decay starts after the warm-up.

        Otherwise the rate would jump at the end of the warm-up. The constructor does not check
        this. A checkpoint of an earlier version may have such a schedule, and it must be read
        before a new one can replace it.

        Raises:
            ConfigError: the final decay reaches into the warm-up.
        """
        if self.style != "WSD" or self.wsd_decay_steps is None:
            return
        longest = math.floor(self.decay_steps - self.warmup_steps)
        if self.wsd_decay_steps > longest:
            raise ConfigError(
                f"WSD's final decay of {self.wsd_decay_steps} samples (--lr-wsd-decay-samples or "
                f"-iters) must not reach into the warm-up of {self.warmup_steps:.10g} samples; use "
                f"at most {longest}, because the decay ends at {self.decay_steps}."
            )

    @property
    def decoupled(self) -> "LRSchedule | None":
        """The schedule of the word embedding and the output matrix.

        It is None if they have the rate of all other parameters.
        """
        if self.decoupled_max_lr is None or self.decoupled_min_lr is None:
            return None
        return replace(
            self,
            max_lr=self.decoupled_max_lr,
            min_lr=self.decoupled_min_lr,
            decoupled_max_lr=None,
            decoupled_min_lr=None,
        )

    def get_lr(
        self,
        lr_samples: int,
        lr_tokens: int = 0,
        warmup_tokens: int = 0,
        *,
        seconds: float = 0.0,
        warmup_seconds: float = 0.0,
    ) -> float:
        """Return the rate of a state by the samples and tokens of all steps applied so far.

        Args:
            lr_samples: Samples of all applied steps.
            lr_tokens: Tokens of all applied steps.
            warmup_tokens: Tokens at the end of warm-up (`compute_warmup_tokens`). It is used only
                with `decay_tokens`.
            seconds: Position in `train_seconds`. It is used only with `train_seconds`.
            warmup_seconds: `seconds` at the end of a warm-up in samples.
        """
        if self.train_seconds is not None and seconds >= self.train_seconds:
            # The time may be up before a warm-up in samples is.
            return self.max_lr if self.style == "constant" else self.min_lr
        warmed, warmup = self._measure_warmup(lr_samples, seconds)
        if warmup <= 0 or warmed > warmup:
            return self._compute_decayed_lr(
                lr_samples, lr_tokens, warmup_tokens, seconds, warmup_seconds
            )
        rising = self._compute_rising_lr(warmed, warmup)
        if not self.decay_from_start:
            return rising
        falling = self._compute_decayed_lr(
            lr_samples, lr_tokens, warmup_tokens, seconds, warmup_seconds
        )
        return min(rising, falling)

    def _compute_rising_lr(self, warmed: float, warmup: float) -> float:
        """Return the rate of the warm-up, which takes `warmup` samples or seconds."""
        rise = self.max_lr - self.warmup_init
        match self.warmup_style:
            case "quadratic":
                return self.warmup_init + rise * (1.0 - (1.0 - warmed / warmup) ** 2)
            case "linear":
                return self.warmup_init + rise * warmed / warmup
            case _:
                assert_never(self.warmup_style)

    def _compute_decayed_lr(
        self,
        lr_samples: int,
        lr_tokens: int,
        warmup_tokens: int,
        seconds: float,
        warmup_seconds: float,
    ) -> float:
        """Return the rate of the decay. The arguments are those of `get_lr`."""
        if self.style == "constant":
            return self.max_lr
        warmed, warmup = self._measure_warmup(lr_samples, seconds)
        end: float
        if self.train_seconds is not None:
            done = seconds
            start = warmup_seconds if self.warmup_fraction is None else warmup
            end = self.train_seconds
        elif self.decay_tokens is None:
            done = float(lr_samples)
            start = float(self.warmup_steps)
            end = self.decay_steps
        else:
            done = float(lr_tokens)
            start = float(warmup_tokens)
            end = self.decay_tokens
        if self.decay_from_start:
            start = 0.0
        # The second condition holds if the warm-up alone took as many tokens as a decay in tokens
        # may take. It avoids a division by zero below.
        if done > end or start >= end:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self._compute_inverse_square_root(warmed, warmup))
        coefficient = self._compute_coefficient(done, start, end)
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)

    def _measure_warmup(self, lr_samples: int, seconds: float) -> tuple[float, float]:
        """Return the progress of the warm-up and its length, in samples or in seconds."""
        if self.train_seconds is not None and self.warmup_fraction is not None:
            return seconds, self.warmup_fraction * self.train_seconds
        # Warm-up counts samples, even if the decay counts tokens or follows the time.
        return float(lr_samples), float(self.warmup_steps)

    def _compute_coefficient(self, done: float, start: float, end: float) -> float:
        """Return the fraction of (max_lr - min_lr) that is left.

        Args:
            done: Progress in samples, tokens or seconds.
            start: Progress at the end of the warm-up, or 0 if the decay begins with training.
            end: Progress at the end of the decay.
        """
        match self.style:
            case "WSD":
                return self._compute_wsd_coefficient(done)
            case "linear":
                return 1.0 - (done - start) / (end - start)
            case "cosine":
                return 0.5 * (math.cos(math.pi * (done - start) / (end - start)) + 1.0)
            case "half-cosine":
                return 1.0 - math.sin(math.pi / 2 * (done - start) / (end - start))
            case "constant" | "inverse-square-root":
                raise AssertionError(f"{self.style} does not fall to the minimum by a coefficient")
            case _:
                assert_never(self.style)

    def _compute_inverse_square_root(self, warmed: float, warmup: float) -> float:
        """Return the rate that falls with the root of the progress, from the peak after warm-up.

        As in Megatron-LM, it counts samples even if the decay ends at a number of tokens, and a run
        without warm-up has its peak at the first sample. It counts seconds only if the warm-up
        does.

        Args:
            warmed: Progress in the unit of the warm-up.
            warmup: Length of the warm-up.
        """
        peak_at = warmup
        if self.warmup_fraction is None or warmup == 0:
            peak_at = max(warmup, 1)
            warmed = max(warmed, 1)
        return self.max_lr * math.sqrt(peak_at) / math.sqrt(warmed)

    def _compute_wsd_coefficient(self, done: float) -> float:
        """Return the fraction of (max_lr - min_lr) that is left.

        It is 1 until the final decay and 0 at its end.

        Args:
            done: Samples of all applied steps, or seconds with `train_seconds`.
        """
        end: float = self.decay_steps
        length: float | None = self.wsd_decay_steps
        if self.train_seconds is not None and self.wsd_decay_fraction is not None:
            end = self.train_seconds
            length = self.wsd_decay_fraction * self.train_seconds
        assert length is not None, "checked at construction"
        into_decay = done - (end - length)
        if into_decay <= 0:
            return 1.0
        ratio = into_decay / length
        # Each shape falls from 1 at ratio 0 to 0 at ratio 1.
        shapes = {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }
        return shapes[self.wsd_decay_style]

    def is_warm(self, lr_samples: int) -> bool:
        """Return whether a warm-up in samples is over. False without one."""
        return 0 < self.warmup_steps <= lr_samples

    def compute_warmup_tokens(self, lr_samples: int, lr_tokens: int, warmup_tokens: int) -> int:
        """Return the state's `warmup_tokens` after a step brought it to (lr_samples, lr_tokens).

        Call it after every applied step. The result is the token count of the first state at or
        past the end of warm-up. Warm-up rarely ends exactly at the edge of a batch. A test for
        equality would miss its end, and the decay would then count from token 0.
        """
        if not self.is_warm(lr_samples):
            return 0
        # Once it is set it stays, so that later steps do not move the start of the decay.
        return warmup_tokens or lr_tokens


def list_schedule_differences(current: LRSchedule, checkpoint: LRSchedule) -> list[str]:
    """Return one entry for each parameter that differs, with its flag and both values.

    The list is empty if the two agree. For a constant rate the end of the decay is not compared. It
    has no effect, and its default changes when a run is prolonged.
    """
    # Without this, each prolonged run with a constant rate would need --override-lr-scheduler.
    constant = current.style == checkpoint.style == "constant"
    names = [
        f.name
        for f in fields(LRSchedule)
        if not (constant and f.name in ("decay_steps", "decay_tokens"))
    ]
    pairs = [(name, getattr(current, name), getattr(checkpoint, name)) for name in names]
    return [
        f"{FIELD_NAMES[name]}: {ours} here, {theirs} in the checkpoint"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
