"""A model whose stages are on several pipeline ranks, for forward passes without gradients.

Invariant: all ranks that hold the model call each method in the same order and with the same
inputs. Only the last pipeline rank has logits.

s: sequence, b: sequences, h: hidden size, v: vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.positions import Positions
from megatron.model.shape import ModelShape
from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import TensorParallel, choose_message_device


class StagedModel:
    """This rank's stage of a model, connected to the stages of the other pipeline ranks."""

    def __init__(self, stage: GPT, pipeline: dist.ProcessGroup | None = None) -> None:
        """Connect a stage.

        Args:
            stage: This rank's stage in evaluation mode.
            pipeline: The ranks of all stages, in the order of the layers. None: the stage is the
                complete model.
        """
        self.stage = stage
        self._pipeline = pipeline
        parameter = next(stage.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        """Dtype of the activations."""
        self._sent: tuple[dist.Work | None, Tensor] | None = None
        """The last message to the next stage. Its tensor must live until it has been sent."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the complete model."""
        return self.stage.shape

    @property
    def tp(self) -> TensorParallel:
        """The tensor-parallel ranks of this stage."""
        return self.stage.tp

    def forward(self, inputs: Inputs) -> Tensor | None:
        """Return the loss of the inputs, and fill their likelihoods.

        It is None on all pipeline ranks but the last.

        Args:
            inputs: The ids, on all pipeline ranks.
        """
        output = self.stage(self._receive(inputs), inputs)
        if self.stage.stage.last:
            return output
        self._send(output)
        return None

    def run_blocks(self, inputs: Inputs, positions: Positions | None = None) -> Tensor | None:
        """Return the residual stream after the last block of the model, [s, b, h].

        It is None on all pipeline ranks but the last. They may compute the next batch while later
        stages compute this one.

        Args:
            inputs: The ids, on all pipeline ranks.
            positions: The tables for attention. By default, they are those of complete samples.
        """
        stream = self.stage.run_blocks(self._receive(inputs), inputs, positions)
        if self.stage.stage.last:
            return stream
        self._send(stream)
        return None

    def compute_logits(self, stream: Tensor) -> Tensor:
        """Map the residual stream after the last block, [s, b, h], to logits [s, b, v] in fp32.

        The ranks of the last stage call it.
        """
        logits = self.stage.project_to_logits(stream)
        tp = self.tp
        if tp.size == 1:
            return logits
        # The last ranks may have fewer real ids, and a gather needs equal shapes.
        padding = self.shape.padded_vocab_size // tp.size - logits.shape[-1]
        padded = torch.nn.functional.pad(logits, (0, padding)).movedim(-1, 0)
        return all_gather(padded, tp)[: self.shape.vocab_size].movedim(0, -1)

    def broadcast_result(self, values: Tensor) -> Tensor:
        """Return the values of the last stage on all ranks.

        Args:
            values: What the last stage computed. On the other stages, a tensor of the same shape
                and dtype, which is overwritten.
        """
        # Values that differ in a bit between tensor-parallel ranks could lead to different
        # decisions, and the ranks would wait for each other forever.
        if self.stage.stage.last and self.tp.size > 1:
            dist.broadcast(values, group=self.tp.group, group_src=0)
        if self._pipeline is not None:
            self._finish_sending()
            dist.broadcast(values, group=self._pipeline, group_src=self._pipeline.size() - 1)
        return values

    def _receive(self, inputs: Inputs) -> Tensor | None:
        """Return the residual stream that the stage before this one sends, [s, b, h]."""
        if self.stage.stage.first:
            return None
        assert self._pipeline is not None, "a stage after the first is in a pipeline"
        batch, length = inputs.tokens.shape
        stream = torch.empty(
            (length, batch, self.shape.config.hidden_size),
            dtype=self.dtype,
            device=choose_message_device(self._pipeline, self.device),
        )
        dist.recv(stream, group=self._pipeline, group_src=self._pipeline.rank() - 1)
        return stream.to(self.device)

    def _send(self, stream: Tensor) -> None:
        """Send the residual stream to the next stage, without waiting until it has arrived."""
        assert self._pipeline is not None, "a stage before the last is in a pipeline"
        # One message at a time, so that a fast stage does not fill the memory with messages.
        self._finish_sending()
        stream = stream.contiguous().to(choose_message_device(self._pipeline, self.device))
        work = dist.isend(stream, group=self._pipeline, group_dst=self._pipeline.rank() + 1)
        self._sent = (work, stream)

    def _finish_sending(self) -> None:
        if self._sent is None:
            return
        work, _ = self._sent
        if work is not None:
            work.wait()
        self._sent = None
