"""Shares of the values that are cut off or become zero in float8, for single iterations.

The counts of all ranks are added up, so a share is that of the complete tensor. Values that are
zero before they are rounded do not count. A recomputation counts the inputs of a layer again, and a
tensor that several ranks have is counted by each of them. Neither changes the share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.base import LayerStatistics
from megatron.engine.layer_statistics import LayerRecorder
from megatron.engine.optimizer import MasterParameter
from megatron.extras.step.float8.rounding import Rounded
from megatron.extras.step.float8.weight_scales import WeightMaxima
from megatron.model.gpt import GPT, read_block_number
from megatron.parallel.mesh import Mesh

Operand = Literal["input", "weight", "gradient"]
_OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
LAYERS = (
    *("attention.qkv", "attention.query", "attention.key", "attention.value", "attention.gate"),
    *("attention.out", "mlp.up", "mlp.gate", "mlp.down"),
)
"""The linear layers of a block."""
_CUT_OFF = 1 + 2.0**-10
"""A value that exceeds the largest one of the format by less than this is only rounded."""


@dataclass(frozen=True)
class Float8Statistics(LayerStatistics):
    """Statistics of layers, with the largest share among the linear layers of each block.

    A share is relative to the values that are not zero. Blocks without float8 have the share 0.
    """

    layer_fp8_input_saturated: list[float]
    """Share of the inputs that are cut off at the largest value of the format."""
    layer_fp8_input_flushed: list[float]
    """Share of the inputs that become zero."""
    layer_fp8_weight_saturated: list[float]
    """The same for weights."""
    layer_fp8_weight_flushed: list[float]
    """The same for weights."""
    layer_fp8_gradient_saturated: list[float]
    """The same for gradients of outputs, before the loss scale and clipping are removed."""
    layer_fp8_gradient_flushed: list[float]
    """The same for gradients of outputs."""


@dataclass(frozen=True)
class Share:
    """The share of one operand of a linear layer."""

    operand: Operand
    layer: str
    """The name of the linear layer in the complete model."""
    saturated: float
    flushed: float


class OperandCounter:
    """Counts values of operands while it is switched on."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        """Create a counter that is switched off, for a model with `num_layers` blocks."""
        self._size = (len(_OPERANDS), len(LAYERS), num_layers, 3)
        self._device = device
        self._counts: Tensor | None = None

    def start(self) -> None:
        """Switch the counter on, with all counts at zero."""
        self._counts = torch.zeros(self._size, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def count(self, operand: Operand, layer: str, x: Tensor, rounded: Rounded) -> None:
        """Count the values of a matrix that are cut off, become zero, and are not zero."""
        if self._counts is None:
            return
        block = read_block_number(layer)
        assert block is not None, f"{layer} is in no block"
        number = LAYERS.index(layer.split(".", 2)[2])
        largest = torch.finfo(rounded.values.dtype).max * _CUT_OFF
        is_used = x != 0
        cut_off = (x.float() / rounded.inverse).abs() > largest
        # With an infinity or a nan in the tensor, the scale is 0 and the step is skipped.
        flushed = is_used & (rounded.values.float() == 0) & rounded.inverse.isfinite()
        found = [each.sum(dtype=torch.float64) for each in (cut_off, flushed, is_used)]
        self._counts[_OPERANDS.index(operand), number, block] += torch.stack(found)

    def take_shares(self, mesh: Mesh) -> Tensor:
        """Return the shares of all ranks, and switch the counter off. All ranks call it together.

        Returns:
            The shares of values that are saturated and flushed, [2, operands, layers, blocks].
        """
        counts, self._counts = self._counts, None
        assert counts is not None, "the counter was started"
        if mesh.grid.world_size > 1:
            with mesh.tensor_parallel.comm_timer():
                dist.all_reduce(counts)
        saturated, flushed, used = counts.unbind(-1)
        return (torch.stack((saturated, flushed)) / used.clamp(min=1.0)).cpu()


class Float8Recorder(LayerRecorder):
    """Collects the statistics of one iteration, with those of float8. See `LayerRecorder`."""

    def __init__(
        self,
        stages: Sequence[GPT],
        mesh: Mesh,
        num_layers: int,
        counter: OperandCounter,
        maxima: WeightMaxima,
        counted: Sequence[MasterParameter],
    ) -> None:
        """Create a recorder.

        Args:
            stages: This rank's stages.
            mesh: This rank's mesh.
            num_layers: The number of blocks of the complete model.
            counter: The counter of the products.
            maxima: The largest values of the weights in this step.
            counted: The parameters that this rank counts.
        """
        super().__init__(stages, mesh, num_layers)
        self._counter = counter
        self._maxima = maxima
        self._counted = counted
        self.shares: list[Share] = []
        """The shares of each operand of each linear layer, after `reduce`."""

    def __enter__(self) -> "Float8Recorder":
        """Add the hooks, and count the weights."""
        super().__enter__()
        self._counter.start()
        # Ranks that share query groups multiply with the same keys and values. The shards have
        # them once.
        for name, rows, rounded in self._maxima.round_shards(self._counted):
            self._counter.count("weight", name.removesuffix(".weight"), rows, rounded)
        return self

    def reduce(self) -> Float8Statistics:
        """Combine the numbers of all ranks. All ranks call it together."""
        shares = self._counter.take_shares(self._mesh)
        self.shares = [
            Share(operand, f"blocks.{block}.{layer}", *shares[:, kind, number, block].tolist())
            for kind, operand in enumerate(_OPERANDS)
            for number, layer in enumerate(LAYERS)
            for block in range(shares.shape[-1])
        ]
        by_name: dict[str, Any] = {
            f"layer_fp8_{operand}_{what}": shares[row, kind].amax(0).tolist()
            for kind, operand in enumerate(_OPERANDS)
            for row, what in enumerate(("saturated", "flushed"))
        }
        return Float8Statistics(**vars(super().reduce()), **by_name)
