"""Our objects and settings under the names that DeepSpeed reads.

DeepSpeed calls a model, a loss scaler, an `mpu` and tied weights by names of its own. What is here
gives our objects these names. Its configuration is built from a plan and the user's
JSON. This module does not import deepspeed.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.extras.interop.translators.deepspeed_json import read_json, select_passed_on
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan


def build_settings(plan: Plan) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a plan.

    The values of our configuration replace those of the user's JSON.
    """
    config = plan.config
    path = config.parallel.deepspeed_config
    precision = config.precision
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        # The number of microbatches changes with the ramp-up of the batch size. `train_batch`
        # sets it before each step.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": plan.zero_stage},
        # By default DeepSpeed refuses bitsandbytes' optimizer with ZeRO. With offload it
        # refuses every optimizer but its own, which needs a C++ extension.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.optimizer.cpu_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if config.parallel.sequence_parallel:
        # The activations are already sharded over tensor-parallel ranks. By default DeepSpeed
        # assumes replicas and sends a part from each rank, which would mix the shards.
        settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if precision.fp16:
        # A static scale keeps DeepSpeed from starting its own search. `train_batch` replaces
        # the scaler before each step (`FixedLossScaler`).
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0}
        # DeepSpeed would cast the fp32 sums to fp16. There they overflow at a lower loss scale
        # than the gradients of one microbatch.
        settings["communication_data_type"] = "fp32"
    if precision.bf16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if precision.fp16 or precision.bf16:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    # DeepSpeed prints a line every `steps_per_print` steps. The training loop logs instead.
    # Its throughput timer would wait for the device twice in each microbatch.
    base: dict[str, Any] = {
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},
    }
    if path:
        base |= select_passed_on(read_json(path), config.parallel.pipeline_model_parallel_size)
    return _merge_settings(base, settings)


def _merge_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two nested dictionaries merged. Values of `above` take precedence."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[key] = _merge_settings(inner, value)
        else:
            result[key] = value
    return result


class StageWrapper(nn.Module):
    """A stage with the signature that DeepSpeed calls.

    DeepSpeed passes activations only. The wrapper takes the microbatches from `begin` in order.
    """

    def __init__(self, stage: GPT) -> None:
        super().__init__()
        self.stage = stage
        self._inputs: Iterator[Inputs] = iter(())

    def add_placeholder(self, part: str, device: torch.device) -> nn.Parameter:
        """Return a parameter of one element that the model does not use.

        It is zero, has no gradient, and is in no checkpoint.
        """
        placeholder = nn.Parameter(torch.zeros(1, device=device))
        self.register_parameter(f"no_{part}", placeholder)
        return placeholder

    def begin(self, inputs: Sequence[Inputs]) -> None:
        """Set the microbatches of the next global batch."""
        self._inputs = iter(inputs)

    def forward(self, x: Tensor | None) -> Tensor:
        """Run the next microbatch: [s, b, h] to [s, b, h], or to the loss on the last stage."""
        # DeepSpeed passes the first stage what it loaded, which `make_empty_batches` left empty.
        return self.stage(None if self.stage.stage.first else x, next(self._inputs))


class TiedWeight:
    """The gradient of a tied parameter, under the names that PipelineEngine reads.

    PipelineEngine adds the gradient up over the two ends of the pipeline.

    PipelineEngine (0.19.8) reads `_hp_grad` with BF16_Optimizer, and `grad` otherwise. ZeRO 1 moves
    each 16-bit gradient into `grad_accum`, which is fp32, and leaves `grad` empty. So the sum of a
    tied parameter would be left out without a message.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        """The accumulated gradient."""
        accumulated: Tensor | None = getattr(self._parameter, "grad_accum", None)
        if accumulated is None:
            return self._parameter.grad
        return accumulated

    @property
    def _hp_grad(self) -> Tensor:
        gradient: Tensor = self._parameter._hp_grad  # type: ignore[attr-defined]
        return gradient


class FixedLossScaler:
    """A loss scaler for DeepSpeed's optimizer whose scale is constant during a step.

    `LossScale` determines the scale of each step.
    """

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Do nothing, because `LossScale` updates the scale."""


def make_mpu(mesh: Mesh) -> Any:
    """Return our mesh under the method names of Megatron's `mpu` module, which DeepSpeed calls."""
    # If the world has one rank, its group is every group.
    tensor = data = dist.group.WORLD
    if mesh.devices is not None:
        tensor, data = mesh.devices.get_group("tp"), mesh.devices.get_group("dp")
    of_model = {
        "model_parallel_rank": mesh.coordinate.tensor,
        "model_parallel_world_size": mesh.grid.tensor,
        "model_parallel_group": tensor,
    }
    values = {
        **of_model,
        **{f"tensor_{name}": value for name, value in of_model.items()},
        "data_parallel_rank": mesh.coordinate.data,
        "data_parallel_world_size": mesh.grid.data,
        "data_parallel_group": data,
        "data_parallel_group_ranks": dist.get_process_group_ranks(data),
    }
    # The default argument binds the value of this pass of the loop.
    return SimpleNamespace(**{f"get_{name}": lambda value=it: value for name, it in values.items()})


def make_empty_batches(microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return dummy batches for DeepSpeed to load on the first and the last stage.

    `StageWrapper` has the data.
    """
    nothing = torch.zeros(1, dtype=torch.long)
    return iter([(nothing, nothing)] * microbatches)
