"""An engine whose device decides whether a step is applied, so that the host can read it later.

Invariant: the device compares the numbers that the host compares, in fp64 and in the same order. So
both take the same decision, on all ranks. The host checks this when it reads the step.

The host queues the microbatches of the next step before it reads the outcome of this one. They need
one number that depends on it, the loss scale of fp16, which the device computes as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.table import Absent, Table
from megatron.data.batches import Microbatch
from megatron.engine.base import StepResult, UpdateSettings, Vote
from megatron.engine.native import NativeEngine
from megatron.engine.optimizer import AdamW
from megatron.plan.run_plan import Plan

OPTIMIZERS = Table(
    "--optimizer", {"adam": "AdamW"}, Absent("cannot leave out a step on the device")
)
"""The optimizers that can, with the names of their classes."""


def find_obstacle(plan: Plan) -> str | None:
    """Return why the host reads each step of a plan before its update, or None if it reads late."""
    config = plan.config
    try:
        OPTIMIZERS.require(config.optimizer.optimizer)
    except ConfigError as absent:
        return str(absent)
    obstacles = {
        "--no-late-reading": not config.kernels.late_reading,
        "the host updates the bias of the routers": bool(plan.shape.expert_layers),
        "--log-params-norm logs the norm after each step": config.logging.log_params_norm,
        "a run by time may end after each step": plan.train_seconds is not None,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


class LateEngine(NativeEngine):
    """A `NativeEngine` with `queue_batch`."""

    def _build(self) -> None:
        super()._build()
        self._obstacle = find_obstacle(self._plan)
        if isinstance(self._optimizer, AdamW) and self._optimizer.is_apex:
            self._obstacle = "apex cannot leave out a step on the device"
        self.reads_late = self._obstacle is None
        self._next_scale: Tensor | None = None
        """Loss scale after a step that was not read yet, in fp64. None: the host knows it."""

    def describe_choices(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table printed at start. See `Engine.describe_choices`."""
        how = "before its update", self._obstacle or ""
        if self.reads_late:
            how = "late", "the device decides on the update; --no-late-reading turns this off"
        return [*super().describe_choices(), ("loss and norm of a step", *how)]

    def queue_batch(
        self,
        microbatches: Sequence[Microbatch],
        *,
        iteration: int,
        plan_update: Callable[[], UpdateSettings | None],
        vote: Vote,
    ) -> Callable[[], StepResult] | None:
        """Queue the work of a step. See `Engine.queue_batch`."""
        for stage in self.stages:
            if not stage.training:
                stage.train()
        self._prepare_step(iteration, len(microbatches))
        factor: float | Tensor = self._get_scale() / len(microbatches)
        # In fp16, the scale may depend on a step that the host has not read yet.
        if self._next_scale is not None:
            factor = (self._next_scale / len(microbatches)).float()
        with self._timers("forward-backward"):
            loss = self._run_microbatches(microbatches, iteration, factor)
        # This reads the step before, so the rates of this update count it.
        settings = plan_update()
        read = None
        with self._timers("optimizer"):
            # Without settings, the step before goes back to a checkpoint.
            if settings is not None:
                read = self._queue_update(loss, settings, vote)
            self._drop_gradients()
        return read

    def _queue_update(
        self, loss: Tensor, settings: UpdateSettings, vote: Vote
    ) -> Callable[[], StepResult]:
        """Queue the update. Return a function that reads the step."""
        self._collect_gradients()
        terms = self._reduce_step(loss, vote)
        counts = self._counted_tokens is not None
        scale = self._get_scale()
        # Everything below is queued. No number of the device is read.
        mean = terms[0]
        # `_judge_step` computes the same on the host. Both must get the same bits.
        norm = terms[1].sqrt() / scale
        finite = mean.isfinite() & norm.isfinite()
        applied = finite
        if counts:
            applied = applied & (terms[-1] != 0)
        accept = settings.accept
        if accept is not None:
            applied = applied & accept(mean, norm)
        # The factor is computed without a branch, because the host does not know the norm.
        factor = torch.ones_like(norm)
        if self._clip > 0:
            factor = torch.where(norm > self._clip, self._clip / (norm + 1e-6), factor)
        # A save may still copy what the update changes, also if the device drops the step.
        self._before_update()
        assert isinstance(self._optimizer, AdamW), "`reads_late` says so"
        decision = torch.stack((applied.double(), factor / scale))
        self._optimizer.step_if(decision, settings.lr, settings.decoupled_lr)
        self._refresh_model(copies=not self._optimizer.writes_copies)
        if self._loss_scale is not None:
            after_applied, after_dropped = self._loss_scale.predict()
            # A step that was rejected or empty leaves the scale as it is.
            self._next_scale = torch.full_like(norm, scale)
            self._next_scale.masked_fill_(applied, after_applied)
            self._next_scale.masked_fill_(~finite, after_dropped)
        read = _start_copy(torch.cat((terms, decision[:1])))

        def finish() -> StepResult:
            *values, decided = read()
            result = self._judge_step(values, scale, accept, votes=True, counts=counts)
            # A step that is not queued may change the scale before the next one that is.
            self._next_scale = None
            assert result.applied == bool(decided), "host and device take the same decision"
            # The optimizer counted the step when it was queued.
            if not result.applied:
                self._set_step_count(self._get_step_count() - 1)
            return result

        return finish


def make_late(engine: type[NativeEngine]) -> Any:
    """Return a subclass of an engine with `queue_batch`."""
    # The engine may be that of another extra, such as float8, so there is no fixed class for it.
    return type(f"Late{engine.__name__}", (LateEngine, engine), {})


def _start_copy(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy numbers to the host. Return a function that waits for them."""
    if values.device.type != "cuda":
        return values.tolist
    # A copy to memory that is not pinned would wait for the device.
    copied = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copied.copy_(values, non_blocking=True)
    # A wait for the device would also wait for the microbatches of the next step.
    event = torch.cuda.Event()
    event.record()

    def read() -> list[float]:
        event.synchronize()
        numbers: list[float] = copied.tolist()
        return numbers

    return read
