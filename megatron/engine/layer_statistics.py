"""Statistics of each transformer layer, for single iterations.

Hooks on the modules read the activations of each microbatch. The kernels of attention and loss do
not return logits, so the largest ones are computed separately, without gradients.

Invariant: training computes the same numbers with and without statistics. The hooks are outside of
recomputation and of compiled graphs, and exist only during the iterations with statistics.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.engine.base import LayerStatistics
from megatron.engine.optimizer import MasterParameter, compute_squared_norm
from megatron.model.block import Block
from megatron.model.gpt import GPT, read_block_number
from megatron.parallel.mesh import Mesh

# Rows of `LayerRecorder._sums`.
_OUTPUT_SQUARES = 0
_OUTPUT_ELEMENTS = 1
_GRADIENT_SQUARES = 2
_WEIGHT_SQUARES = 3


class LayerRecorder:
    """Collects the statistics of one iteration.

    It is a context manager. Activations are recorded inside the `with` block.
    """

    def __init__(self, stages: Sequence[GPT], mesh: Mesh, num_layers: int) -> None:
        """Create a recorder of this rank's stages.

        Args:
            stages: This rank's stages.
            mesh: This rank's mesh.
            num_layers: The number of layers of the complete model.
        """
        self._stages = stages
        self._mesh = mesh
        self._hooks: list[RemovableHandle] = []
        # [4, layers]. Layers of other ranks stay 0, so that the sum over all ranks is right.
        self._sums = torch.zeros((4, num_layers), dtype=torch.float64, device=mesh.device)
        # [layers + 1]. The last number is the output logit, which stays 0 without the last stage.
        self._largest = torch.zeros(num_layers + 1, dtype=torch.float32, device=mesh.device)

    def __enter__(self) -> "LayerRecorder":
        """Add the hooks."""
        for stage in self._stages:
            for number, block in stage.get_blocks().items():
                # FSDP2 registered its hooks earlier, so the parameters are gathered when ours run.
                self._hooks += [
                    block.register_forward_pre_hook(partial(self._record_input, number)),
                    block.register_forward_hook(partial(self._record_output, number)),
                ]
            if stage.head is not None:
                self._hooks.append(
                    stage.head.norm.register_forward_hook(partial(self._record_head, stage))
                )
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def _record_input(self, number: int, block: Block, arguments: tuple[Any, ...]) -> None:
        """Record the largest attention logit of one microbatch."""
        x, positions, *_ = arguments
        self._keep_largest(number, block.find_largest_attention_logit(x, positions))

    @torch.no_grad()
    def _record_output(self, number: int, block: Block, arguments: Any, output: Tensor) -> None:
        """Record the squares of a layer's output for one microbatch."""
        # Without sequence parallelism, the tensor-parallel ranks have the same output. All of them
        # count it in both sums, which does not change the mean.
        self._sums[_OUTPUT_SQUARES, number] += compute_squared_norm([output.float()])
        self._sums[_OUTPUT_ELEMENTS, number] += output.numel()

    @torch.no_grad()
    def _record_head(self, stage: GPT, norm: nn.Module, arguments: Any, output: Tensor) -> None:
        """Record the largest output logit of one microbatch."""
        self._keep_largest(-1, stage.find_largest_output_logit(output))

    def _keep_largest(self, index: int, value: Tensor) -> None:
        self._largest[index] = torch.maximum(self._largest[index], value)

    def record_gradients(self, counted: Sequence[MasterParameter], scale: float) -> None:
        """Record the squares of the gradients.

        Args:
            counted: The parameters that this rank counts. See `NativeEngine._is_counted`.
            scale: The loss scale, which the gradients still contain.
        """
        for number, masters in _group_by_layer(counted).items():
            gradients = [m.weight.grad for m in masters if m.weight.grad is not None]
            squares = compute_squared_norm(gradients, self._sums.device)
            self._sums[_GRADIENT_SQUARES, number] = squares / scale**2

    def record_weights(self, counted: Sequence[MasterParameter]) -> None:
        """Record the squares of the weights that this rank counts."""
        for number, masters in _group_by_layer(counted).items():
            self._sums[_WEIGHT_SQUARES, number] = compute_squared_norm(
                [m.weight.data for m in masters], self._sums.device
            )

    def reduce(self) -> LayerStatistics:
        """Combine the numbers of all ranks. All ranks call it together."""
        # Backends do not agree on the maximum of nan and a number. They agree on infinity.
        largest = self._largest.nan_to_num(nan=math.inf)
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(self._sums)
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        *attention_logits, output_logit = largest.tolist()
        outputs = self._sums[_OUTPUT_SQUARES] / self._sums[_OUTPUT_ELEMENTS]
        return LayerStatistics(
            layer_output_rms=outputs.sqrt().tolist(),
            layer_grad_norm=self._sums[_GRADIENT_SQUARES].sqrt().tolist(),
            layer_params_norm=self._sums[_WEIGHT_SQUARES].sqrt().tolist(),
            layer_attention_logit=attention_logits,
            output_logit=output_logit,
        )


def _group_by_layer(masters: Sequence[MasterParameter]) -> dict[int, list[MasterParameter]]:
    """Return the parameters of each layer by its number in the complete model."""
    layers: dict[int, list[MasterParameter]] = {}
    for master in masters:
        number = read_block_number(master.name)
        if number is not None:
            layers.setdefault(number, []).append(master)
    return layers
