"""GPT and Llama models that can be divided into pipeline stages.

A stage holds some of the blocks. The first stage also holds the embedding, and the last the head.
Parameter names are global: a block is named by its number in the complete model. Tokens and labels
are [b, s], activations [s, b, h].
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron.config.loss import LossConfig
from megatron.model.block import Block
from megatron.model.embedding import Embedding
from megatron.model.execution import Execution
from megatron.model.experts.routing import Routing
from megatron.model.goldfish import find_loss_mask
from megatron.model.inputs import Inputs, SampleLikelihoods
from megatron.model.loss import (
    VocabSlice,
    cross_entropy,
    find_largest_output_logit,
    score_labels,
)
from megatron.model.norm import build_norm
from megatron.model.partition import Stage, make_single_stage
from megatron.model.positions import Positions, PositionTables
from megatron.model.shape import ModelShape
from megatron.model.tally import Tally
from megatron.parallel.collectives import enter_tensor_parallel
from megatron.parallel.context import take_own
from megatron.parallel.layers import make_parameter, split_evenly
from megatron.parallel.mesh import ContextParallel, ExpertParallel, TensorParallel
from megatron.parallel.parameter_spec import Init, ParameterSpec

EMBEDDING = "embedding."
"""What the names of the embedding's parameters start with."""

# Name of the parameter that a tied output matrix on another stage is a replica of. Checkpoints
# store it under this name only.
WORD_EMBEDDING = "embedding.word.weight"
INPUT_AND_OUTPUT = (WORD_EMBEDDING, "head.weight")
"""Names of the parameters with a row for each token: the word embedding and the output matrix.

The second is missing if the output matrix is tied.
"""


_BLOCKS = "blocks."


def read_block_number(name: str) -> int | None:
    """Return the number of the block that a parameter belongs to, or None if it is in no block.

    Args:
        name: Name of the parameter in the complete model.
    """
    if not name.startswith(_BLOCKS):
        return None
    return int(name.split(".")[1])


class Head(nn.Module):
    """Final norm and output matrix.

    The matrix is left out if it is tied to a word embedding on the same stage.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, stage: Stage) -> None:
        """Create the norm, and the output matrix if this stage needs one."""
        super().__init__()
        config = shape.config
        self.norm = build_norm(config, tp)
        self.weight: nn.Parameter | None = None
        tied = not config.untie_embeddings_and_output_weights
        if not (tied and stage.first):
            # A tied matrix on its own stage is a replica of the word embedding. The engine adds the
            # gradients of both.
            rows = split_evenly(shape.padded_vocab_size, tp)
            if tied:
                copy_of = WORD_EMBEDDING
            else:
                copy_of = None
            spec = ParameterSpec(
                (shape.vocab_size, config.hidden_size),
                Init.TABLE,
                decays=True,
                shard_dim=0,
                copy_of=copy_of,
            )
            self.weight = make_parameter((rows, config.hidden_size), spec)

    def forward(self, x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
        """Return use(norm(x)). FSDP2 has gathered the output matrix while `use` runs.

        Args:
            x: The residual stream after the last block.
            use: A function that multiplies by the output matrix.
        """
        return use(self.norm(x))


class GPT(nn.Module):
    """One stage of the model, by default all of it. A part that the stage lacks is None."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        stage: Stage | None = None,
        execution: Execution | None = None,
        loss: LossConfig | None = None,
        context: ContextParallel | None = None,
        ranks: ExpertParallel | None = None,
    ) -> None:
        """Build the parts of one stage, uninitialised.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
            stage: The stage to build. By default it is the complete model.
            execution: The precision of the blocks and of the residual stream. `parallelize.py` of
                the engines applies recomputation and compilation.
            loss: What training adds to cross entropy, or leaves out of it. Default: nothing.
            context: The ranks that share the sequence. Default: this rank has all of it.
            ranks: The ranks that divide the experts. Default: this rank has all of them.
        """
        super().__init__()
        self.shape = shape
        self.tp = tp
        self.context = context = context or ContextParallel()
        self.stage = stage = stage or make_single_stage(shape)
        execution = execution or Execution()
        self._dtype = execution.dtype
        self._loss_kernels = execution.operators.loss
        self._loss = loss or LossConfig()
        self.embedding: Embedding | None = None
        if stage.first:
            self.embedding = Embedding(shape, tp, context, fp32_residual=execution.fp32_residual)
        # A dictionary, so that the names of parameters have the global number of the block.
        self.blocks = nn.ModuleDict(
            {str(i): Block(shape, i, tp, self._loss, context, ranks) for i in stage.layers}
        )
        self.head: Head | None = None
        if stage.last:
            self.head = Head(shape, tp, stage)
        self.position_tables = PositionTables(
            shape, tp, context, pack_documents=execution.pack_documents
        )
        # The padding is at the end of the vocabulary. The last ranks may hold padding only.
        rows = split_evenly(shape.padded_vocab_size, tp)
        first = tp.rank * rows
        self.tally: Tally | None = None
        """Receives the sums of an evaluation, if there is a head. An engine sets it."""
        self._vocab = VocabSlice(first, min(max(shape.vocab_size - first, 0), rows))

    def forward(self, x: Tensor | None, inputs: Inputs) -> Tensor:
        """Compute this stage.

        Args:
            x: The residual stream before this stage, or None for the first stage.
            inputs: The microbatch, with all positions of its samples.

        Returns:
            The residual stream after this stage, [s, b, h], or [s/t, b, h] with sequence
            parallelism. With context parallelism, read s/c for s. For the last stage it is the mean
            loss of the microbatch, a scalar in fp32. The mean over the context-parallel ranks is
            that of all positions.
        """
        # Data loading and counts do not depend on how many ranks share a sequence.
        own = inputs.take_own(self.context)
        x = self.run_blocks(x, own)
        if self.head is None:
            return x
        return cast(Tensor, self.head(x, partial(self._compute_loss, inputs, own)))

    def _compute_loss(self, inputs: Inputs, own: Inputs, normalised: Tensor) -> Tensor:
        """Return the mean loss as `forward` does it.

        Args:
            inputs: The microbatch, with all positions of its samples.
            own: The positions of this rank.
            normalised: The output of the final norm, as `forward` gets the residual stream.
        """
        assert own.labels is not None, "the loss needs labels"
        # Which tokens count depends on all labels of a sample.
        mask = find_loss_mask(inputs, self._loss, training=self.training)
        hidden = self._enter_output(normalised)
        if inputs.likelihoods is not None:
            return self._fill_likelihoods(inputs.likelihoods, hidden, own)
        divisor = inputs.loss_divisor
        if self.context.size > 1:
            if mask is not None and divisor is None:
                divisor = mask.sum().clamp(min=1.0)
            # The counts are those of complete samples, and this rank has a share of them.
            if divisor is not None:
                divisor = divisor / self.context.size
            if mask is not None:
                mask = take_own(mask, self.context, 1)
        return cross_entropy(
            hidden,
            self._get_output_weight(),
            own.labels.t(),
            self._vocab,
            self.tp,
            None if mask is None else mask.t(),
            divisor=divisor,
            # The validation loss stays comparable between runs.
            z_loss=self._loss.z_loss_coefficient if self.training else 0.0,
            tally=None if self.training else self.tally,
            kernels=self._loss_kernels,
        )

    def _fill_likelihoods(
        self, likelihoods: SampleLikelihoods, hidden: Tensor, inputs: Inputs
    ) -> Tensor:
        """Fill the likelihood of each sample, and return the mean loss as `forward` does."""
        assert inputs.labels is not None, "likelihoods need labels"
        assert inputs.loss_mask is not None, "likelihoods need a mask"
        likelihoods.of_positions, likelihoods.greedy = score_labels(
            hidden,
            self._get_output_weight(),
            inputs.labels.t(),
            inputs.loss_mask.t(),
            self._vocab,
            self.tp,
        )
        # A sum over complete columns has a fixed order on every device, so it is repeatable.
        likelihoods.log_likelihood = likelihoods.of_positions.sum(dim=0)
        return -likelihoods.log_likelihood.sum().float() / inputs.loss_mask.sum().clamp(min=1.0)

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """Compute the logits of this rank's real ids. The complete model must be in one stage.

        Args:
            tokens: Ids, [b, s].

        Returns:
            Logits in fp32 without the padding, [b, s, v/t].
        """
        return self.project_to_logits(self.run_blocks(None, Inputs(tokens))).transpose(0, 1)

    def project_to_logits(self, x: Tensor) -> Tensor:
        """Map the residual stream after the last block, [s, b, h], to logits [s, b, v/t] in fp32.

        The logits are those of this rank's real ids, without the padding.
        """
        assert self.head is not None, "only the last stage has logits"
        hidden = self._enter_output(self.head.norm(x))
        weight = self._get_output_weight()[: self._vocab.real]
        return torch.nn.functional.linear(hidden, weight).float()

    def find_largest_output_logit(self, normalised: Tensor) -> Tensor:
        """Return the largest absolute value of this rank's output logits, a scalar in fp32.

        Args:
            normalised: The output of the final norm, [s, b, h], or [s/t, b, h] with sequence
                parallelism.
        """
        hidden = self._enter_output(normalised)
        return find_largest_output_logit(hidden, self._get_output_weight(), self._vocab)

    def run_blocks(
        self, x: Tensor | None, inputs: Inputs, positions: Positions | None = None
    ) -> Tensor:
        """Return the residual stream after the last block of this stage.

        Args:
            x: The residual stream before this stage, or None for the first stage.
            inputs: The microbatch.
            positions: The tables for attention. By default, they are those of complete samples.
        """
        if self.embedding is not None:
            x = self.embedding(inputs)
        assert x is not None, "a stage after the first needs the residual stream"
        # The blocks' dtype may differ from the dtype of an fp32 residual stream.
        if positions is None:
            positions = self.position_tables.make_positions(inputs, self._dtype or x.dtype)
        routing = Routing(inputs.loss_factor, x.shape[1])
        for block in self.blocks.values():
            x = block(x, positions, inputs.dropout_key, routing)
        return x

    def get_blocks(self) -> dict[int, Block]:
        """Return the blocks of this stage by their numbers in the complete model."""
        return {int(name): cast(Block, block) for name, block in self.blocks.items()}

    def _enter_output(self, normalised: Tensor) -> Tensor:
        """Return what the output matrix multiplies, from the output of the final norm."""
        factor = self.shape.output_factor
        if factor != 1.0:
            normalised = normalised * factor
        return enter_tensor_parallel(normalised, self.tp)

    def _get_output_weight(self) -> Tensor:
        assert self.head is not None, "only the last stage has an output matrix"
        if self.head.weight is not None:
            return self.head.weight
        assert self.embedding is not None, "tied on one stage"
        return self.embedding.word.weight
