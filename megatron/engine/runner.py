"""Runners that pass the microbatches of a global batch through the stages of a rank.

`SingleStageRunner` runs the microbatches one after the other. With several pipeline ranks,
`PipelineRunner` (`megatron.engine.pipeline_runner`) runs them in the order of a schedule.

The invariant: every microbatch passes every block once, forward and backward. The gradients are
those of `factor` x the sum of the losses. Only the rank with the last stage knows the loss.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.engine.parallelize import RankStage
from megatron.model.execution import Execution
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import Mesh
from megatron.parallel.rank_progress import RankProgress


class VectorSums:
    """The fp32 sums of the gradients of biases and norms, which are many and small.

    Autograd would cast each vector's gradient to fp32 and add it to the sum in two kernels, which
    are a third of all kernels of a microbatch of GPT-2. Here they stay in 16 bits until the end of
    the microbatch, and two kernels add all of them. The memory of the sums never moves.

    The invariant: the sums are those of autograd, bit for bit. Each vector is used once in a
    microbatch, so its gradient is a sum of autograd over nothing else.
    """

    def __init__(self, vectors: Sequence[nn.Parameter]) -> None:
        """Take over the gradients of parameters [n], of any sizes."""
        self._vectors = vectors
        for vector in vectors:
            # The gradient of a microbatch is in 16 bits, and that of a step in fp32.
            vector.grad_dtype = None
        # Only the memory is needed. CUDA graphs that were recorded write to the same addresses.
        self._sums = torch.cat([vector.detach() for vector in vectors]).float()
        self._parts = self._sums.split([vector.numel() for vector in vectors])

    def add(self, *, first: bool) -> None:
        """Add the gradients of a microbatch, which are dropped. The first one replaces the sums."""
        gradients = torch.cat([vector.grad for vector in self._vectors if vector.grad is not None])
        if first:
            self._sums.copy_(gradients)
        else:
            self._sums.add_(gradients)
        # Otherwise autograd would add the next microbatch's gradient in 16 bits.
        for vector in self._vectors:
            vector.grad = None

    def assign(self) -> None:
        """Let the sums be the gradients of the parameters."""
        for vector, part in zip(self._vectors, self._parts, strict=True):
            vector.grad = part


class Runner(Protocol):
    """Runs the microbatches of a global batch through this rank's stages."""

    def run(self, inputs: Sequence[Inputs], factor: float | Tensor, *, train: bool) -> Tensor:
        """Run the forward passes and, with `train`, the backward passes.

        Args:
            inputs: The microbatches of this rank.
            factor: The factor on each loss before its backward pass. A number or a scalar in fp32.
            train: Whether to add the gradients of `factor` x the sum of the losses to the
                parameters' gradients.

        Returns:
            The mean loss of the microbatches, a scalar in fp32. It is zero on ranks without the
            last stage.
        """


class SingleStageRunner:
    """A runner without a pipeline. The only stage is the complete model."""

    def __init__(
        self, stage: RankStage, progress: RankProgress, vectors: Sequence[nn.Parameter] = ()
    ) -> None:
        """Create a runner of the only stage. `vectors`: see `build_runner`."""
        self._stage = stage
        self.progress = progress
        # A run in fp32 has none, and torch cannot concatenate an empty list.
        self._vectors = VectorSums(vectors) if vectors else None

    def run(self, inputs: Sequence[Inputs], factor: float | Tensor, *, train: bool) -> Tensor:
        """Run the microbatches one after the other. See `Runner.run`."""
        # The sum stays on the device. Reading each loss would wait for the GPU every microbatch.
        total = torch.zeros((), dtype=torch.float32, device=inputs[0].tokens.device)
        for number, microbatch in enumerate(inputs):
            self.progress.begin_part(f"microbatch {number + 1}")
            if train and self._stage.sharded is not None:
                self._stage.sharded.prepare_backward(last=number == len(inputs) - 1)
            if train:
                loss = self.compute_gradients(microbatch, factor, first=number == 0)
            else:
                loss = self._stage.model(None, microbatch)
            total += loss / len(inputs)
        if train:
            self.finish_sums()
        return total

    def compute_gradients(
        self, microbatch: Inputs, factor: float | Tensor, *, first: bool
    ) -> Tensor:
        """Compute the gradients of `factor` x the loss of a microbatch, and return the loss.

        Args:
            microbatch: The microbatch.
            factor: See `Runner.run`.
            first: Whether it is the first microbatch of a step. Otherwise gradients are added to
                the sums of vectors.
        """
        loss: Tensor = self._stage.model(None, microbatch)
        (loss * factor).backward()
        if self._vectors is not None:
            self._vectors.add(first=first)
        return loss.detach()

    def finish_sums(self) -> None:
        """Let the sums of vectors be their gradients, after the last microbatch of a step."""
        if self._vectors is not None:
            self._vectors.assign()


def build_runner(
    stages: Sequence[RankStage],
    mesh: Mesh,
    *,
    num_stages: int,
    execution: Execution,
    vectors: Sequence[nn.Parameter],
) -> Runner:
    """Return the runner of this rank's stages.

    Args:
        stages: This rank's stages, in the order of the layers.
        mesh: This rank's mesh.
        num_stages: The number of stages on all ranks together.
        execution: How the blocks are computed.
        vectors: Parameters whose gradients are added up in fp32 together. A schedule of several
            stages leaves them to autograd.
    """
    if mesh.grid.pipeline == 1:
        return SingleStageRunner(stages[0], mesh.progress, vectors)
    # torch's pipeline schedules import torch's compiler, which takes seconds on every rank. A run
    # without a pipeline needs neither of them.
    from megatron.engine.pipeline_runner import PipelineRunner

    # Stages send the residual stream to each other in this dtype.
    dtype = execution.dtype or torch.float32
    if execution.fp32_residual:
        dtype = torch.float32
    return PipelineRunner(stages, mesh, num_stages=num_stages, dtype=dtype)
