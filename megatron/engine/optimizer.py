"""Optimizers over fp32 master weights, and two statistics of gradients: norm and number of zeros.

The invariant: an optimizer sees plain local fp32 weights. They may be a module's own parameters,
FSDP2's shards or masters of bf16 weights. Its numbers are therefore the same in every layout.
AdamW: https://arxiv.org/abs/1711.05101.

The moments may be in bf16 (docs/decisions/050). An update then reads them as fp32, uses the new
values in fp32, and rounds them when it stores them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from megatron.base import apex
from megatron.config.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    OptimizerRow,
    find_updater,
)
from megatron.model.fused_operators import FusedOperators
from megatron.model.gpt import EMBEDDING, INPUT_AND_OUTPUT
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameter_spec import Init, ParameterSpec
from megatron.parallel.shard import Kind
from megatron.parallel.torch_private import (
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    fused_adamw_,
)
from megatron.plan.run_plan import Plan

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Value of --exp-avg-dtype and --exp-avg-sq-dtype -> the dtype."""
PIECE = 1 << 24
"""Number of elements that are updated together. Two intermediate results of them have 128 MiB."""


@dataclass(frozen=True)
class Scaling:
    """Factors on settings of the optimizer for one parameter, by the size of the model.

    They are those of `--parametrization`. m is the width ratio, d the depth ratio. The rate, the
    decay and epsilon of the base model are multiplied by

    | parameter                      | rate  | decay | epsilon    |
    |--------------------------------|-------|-------|------------|
    | matrices of the layers         | 1 / m | m     | 1 / (m d)  |
    | vectors of the layers          | 1     | none  | 1 / (m d)  |
    | embedding, output              | 1     | 1     | 1 / m      |
    | final norm, embedding norm     | 1     | none  | 1 / m      |

    Sources: https://arxiv.org/abs/2203.03466, table 8, and https://arxiv.org/abs/2505.01618, table
    1 with alpha = 1. `ModelShape` has the rest: initial weights, and factors on the final norm, the
    queries and the residual branches.

    The first row is that of AdamW and AdEMAMix. Muon's updates of the layers' matrices are
    orthogonal. The spectral norm of an update must be about sqrt(rows / columns)
    (https://arxiv.org/abs/2310.17813), which is the same for all widths if both grow alike. Only
    the factor `spectral` makes the norm grow, as sqrt(m).
    """

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0


UNSCALED = Scaling()
"""The factors of the standard parametrization."""


def compute_scaling(
    name: str, spec: ParameterSpec, shape: ModelShape, config: OptimizerConfig
) -> Scaling:
    """Return the factors for a parameter.

    Args:
        name: Global name of the parameter.
        spec: Its spec. Its kind of initial values shows a matrix of the layers.
        shape: Sizes of the model.
        config: The optimizer.
    """
    m = shape.width_ratio
    # Gradients fall as the factor on the logits does, and Adam adds epsilon to their size.
    epsilon = 1.0 / m
    if name.startswith("blocks."):
        epsilon /= shape.depth_ratio
    # A matrix of the layers adds up as many products as the model is wide.
    if spec.init in (Init.NORMAL, Init.SCALED_NORMAL):
        divisor = find_updater(config.optimizer, name, len(spec.shape)).divide_rate(m, config)
        return Scaling(1.0 / divisor, divisor, epsilon)
    return Scaling(epsilon=epsilon)


@dataclass
class MasterParameter:
    """One parameter's local shard in fp32, as the optimizer sees it."""

    name: str
    spec: ParameterSpec
    offset: tuple[int, ...]
    """Offset of the local shard in the global parameter."""
    model_parameter: nn.Parameter
    """The parameter that the module computes with.

    It has the same memory as `weight`, or it is a low-precision copy.
    """
    weight: nn.Parameter
    """The master in fp32. Its `.grad` is set only for the optimizer's step."""

    decay_embeddings: bool = True
    """Whether weight decay applies to the tables of the embedding."""
    scaling: Scaling = UNSCALED
    """Factors on the learning rate, the weight decay and epsilon."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies. The spec and, for the embedding, the settings decide."""
        if not self.spec.decays:
            return False
        return self.decay_embeddings or not self.name.startswith(EMBEDDING)

    @property
    def decoupled(self) -> bool:
        """Whether --decoupled-lr sets the learning rate."""
        return self.name in INPUT_AND_OUTPUT


Masters = list[MasterParameter]


class Optimizer(ABC):
    """The rule that updates all master parameters of this rank.

    The states exist from the start, so that a checkpoint can be loaded into them. They are zero.
    """

    row: ClassVar[OptimizerRow]
    """Its row of `OPTIMIZERS`, which has the states."""
    description: tuple[str, str, str]
    """The row of the table printed at start. See `Engine.describe_choices`."""
    writes_copies = False
    """Whether `step` also writes the copies in 16 bits with which the model computes."""

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        """Create an optimizer of this rank's master parameters."""
        self.masters = masters
        self.step_count = 0
        self._config = config
        dtypes = {state.kind: MOMENT_DTYPES[state.get_dtype(config)] for state in self.row.states}
        self.states: dict[Tensor, dict[Kind, Tensor]] = {
            master.weight: {
                kind: torch.zeros_like(master.weight, dtype=dtype) for kind, dtype in dtypes.items()
            }
            for master in masters
            if self.row.updates(master.name, len(master.spec.shape))
        }
        """Weight of a master -> its live states."""

    @classmethod
    def build(cls, masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators) -> Self:
        """Build the optimizer of a run. All ranks must call it.

        Args:
            masters: The parameters of this rank.
            plan: The plan of the run.
            mesh: This rank's mesh.
            operators: The kernels of the run. AdamW may have one.
        """
        return cls(masters, plan.config.optimizer)

    def get_kinds(self, master: MasterParameter) -> tuple[Kind, ...]:
        """Return the kinds of state that a parameter has, such as Adam's two moments."""
        return tuple(self.states[master.weight])

    def get_moment(self, master: MasterParameter, kind: Kind) -> Tensor:
        """Return a live state of a parameter, with the shape of its master."""
        return self.states[master.weight][kind]

    @abstractmethod
    def step(self, lr: float, decoupled_lr: float | None = None, factor: float = 1.0) -> None:
        """Update the weights with the gradients of the masters, which this may overwrite.

        Args:
            lr: The learning rate.
            decoupled_lr: The rate of the decoupled parameters. None: `lr`.
            factor: The gradients are multiplied by it first. It is above 0.
        """

    def set_step_count(self, count: int) -> None:
        """Set the number of steps that the states have had. Bias corrections depend on it."""
        self.step_count = count

    def reset(self) -> None:
        """Reset the states and the step count to zero."""
        for states in self.states.values():
            for state in states.values():
                state.zero_()
        self.set_step_count(0)


def group_masters(masters: list[MasterParameter]) -> list[list[MasterParameter]]:
    """Return groups of parameters with the same learning rate, weight decay and epsilon."""
    groups: dict[tuple[bool, bool, Scaling], list[MasterParameter]] = {}
    for master in masters:
        key = master.decays, master.decoupled, master.scaling
        groups.setdefault(key, []).append(master)
    return list(groups.values())


def choose_rate(lr: float, decoupled_lr: float | None, *, decoupled: bool) -> float:
    """Return the learning rate of a decoupled or another parameter. See `Optimizer.step`."""
    if decoupled and decoupled_lr is not None:
        return decoupled_lr
    return lr


def compute_decay(master: MasterParameter, config: OptimizerConfig) -> float:
    """Return the weight decay of a parameter, 0 if it has none."""
    if not master.decays:
        return 0.0
    return config.weight_decay * master.scaling.decay


@contextmanager
def open_in_fp32(stored: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Return a context with these tensors in fp32. At its end, changes are rounded and stored.

    A tensor that is fp32 already is returned itself.
    """
    opened = [tensor.float() for tensor in stored]
    yield opened
    pairs = [pair for pair in zip(stored, opened, strict=True) if pair[0] is not pair[1]]
    if pairs:
        foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def stores_bf16(config: OptimizerConfig) -> bool:
    """Return whether a moment is in bf16."""
    return "bf16" in (config.exp_avg_dtype, config.exp_avg_sq_dtype)


def split_batches(
    tensors: Sequence[tuple[Tensor, ...]], limit: int | None
) -> Iterator[list[list[Tensor]]]:
    """Yield lists of what is updated together, to limit the memory of intermediate results.

    Args:
        tensors: Tensors of each parameter that have its shape, such as weight and gradient.
        limit: Largest number of elements of a batch. The tensors are then flat, and large ones are
            divided. None: all of them, as they are, are one batch.

    Yields:
        For each place in the tuples, the list of these tensors.
    """
    if limit is None:
        yield [list(column) for column in zip(*tensors, strict=True)]
        return
    batch: list[tuple[Tensor, ...]] = []
    elements = 0
    for of_parameter in tensors:
        flat = (tensor.view(-1).split(limit) for tensor in of_parameter)
        for piece in zip(*flat, strict=True):
            if batch and elements + piece[0].numel() > limit:
                yield [list(column) for column in zip(*batch, strict=True)]
                batch = []
                elements = 0
            batch.append(piece)
            elements += piece[0].numel()
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]


def scale_gradients(masters: Sequence[MasterParameter], factor: float) -> None:
    """Multiply the gradients of masters by a number."""
    gradients = [m.weight.grad for m in masters if m.weight.grad is not None]
    # One pass over the gradients does both, unscaling and clipping.
    if factor != 1.0 and gradients:
        foreach_mul_(gradients, factor)


class AdamW(Optimizer):
    """Adam with decoupled weight decay on matrices only."""

    row = OPTIMIZERS.require("adam")

    def __init__(self, masters: list[MasterParameter], config: OptimizerConfig) -> None:
        """Create the optimizer: apex's FusedAdam on a GPU if installed, otherwise torch's AdamW."""
        super().__init__(masters, config)
        self._groups: list[dict[str, Any]] = [
            {
                # A rank may have no element of a small parameter. apex's kernel skips the tensors
                # that follow an empty one in its list.
                "params": [m.weight for m in group if m.weight.numel()],
                "weight_decay": compute_decay(group[0], config),
                "eps": config.adam_eps * group[0].scaling.epsilon,
                "decoupled": group[0].decoupled,
                "factor": group[0].scaling.rate,
            }
            for group in group_masters(masters)
        ]
        apex_adam, reason = None, "apex is for GPUs"
        if any(m.weight.is_cuda for m in masters):
            reason = "apex keeps moments in fp32"
            if not stores_bf16(config):
                apex_adam, reason = apex.find("apex.optimizers", "FusedAdam")
        self.description = ("optimizer", "torch AdamW, fused", reason)
        self._apex: torch.optim.Optimizer | None = None
        if apex_adam is not None:
            betas = (config.adam_beta1, config.adam_beta2)
            # The learning rate is 0 here, because `step` sets it.
            self._apex = apex_adam(
                self._groups, lr=0.0, betas=betas, eps=config.adam_eps, adam_w_mode=True
            )
            self.description = ("optimizer", "apex FusedAdam", reason)
            self._groups = self._apex.param_groups
            # apex would create its state in the first step. A load needs it earlier.
            self._apex.state.update(self.states)
        self.set_step_count(0)

    @classmethod
    def build(cls, masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators) -> Self:
        """Build the optimizer, with a kernel if there is one. See `Optimizer.build`."""
        build: Any = operators.build_adamw or cls
        return build(masters, plan.config.optimizer)

    @property
    def is_apex(self) -> bool:
        """Whether apex updates the weights."""
        return self._apex is not None

    def set_step_count(self, count: int) -> None:
        """Set the number of steps that the moments have had. See `Optimizer.set_step_count`."""
        super().set_step_count(count)
        # apex keeps the step count in the parameter groups.
        if self._apex is not None:
            for group in self._groups:
                group["step"] = count

    def step(self, lr: float, decoupled_lr: float | None = None, factor: float = 1.0) -> None:
        """Update the weights. See `Optimizer.step`."""
        self._begin_step(lr, decoupled_lr)
        if self._apex is None:
            self._update(factor)
        else:
            scale_gradients(self.masters, factor)
            self._apex.step()

    def step_if(self, decision: Tensor, lr: float, decoupled_lr: float | None) -> None:
        """Update the weights if the device has decided so. apex cannot do it.

        The step is counted. If it was dropped, the caller must set the step count back.

        Args:
            decision: fp64[2] on the device: 1 to update and 0 to change nothing, and the factor on
                the gradients.
            lr: See `step`.
            decoupled_lr: See `step`.
        """
        assert self._apex is None, "apex cannot drop a step"
        self._begin_step(lr, decoupled_lr)
        self._update(decision[1], 1.0 - decision[0])

    def _begin_step(self, lr: float, decoupled_lr: float | None) -> None:
        for group in self._groups:
            rate = choose_rate(lr, decoupled_lr, decoupled=group["decoupled"])
            group["lr"] = rate * group["factor"]
        self.step_count += 1

    @torch.no_grad()
    def _update(self, factor: float | Tensor, dropped: Tensor | None = None) -> None:
        """Update the parameters that have a gradient, with the operator of `torch.optim.AdamW`.

        That class itself imports torch's compiler when it is created, which takes seconds on every
        rank.

        Args:
            factor: See `Optimizer.step`. A number, or a scalar on the device.
            dropped: A scalar on the device, 1 to change nothing and 0 to update. None: 0.
        """
        config = self._config
        for group in self._groups:
            tensors = [
                # The states are in the order of the row: first and second moment.
                (weight, weight.grad, *self.states[weight].values())
                for weight in group["params"]
                if weight.grad is not None
            ]
            if not tensors:
                continue
            device = tensors[0][0].device
            # The operator needs the count on the device. A fill does not make the host wait.
            step = torch.full((), float(self.step_count), dtype=torch.float32, device=device)
            scale = None
            if isinstance(factor, Tensor) and device.type != "cpu":
                # The operator divides by its scale, which must be in fp32.
                scale = (1.0 / factor).float()
            elif isinstance(factor, Tensor) or (factor != 1.0 and device.type == "cpu"):
                # A division would give other bits than all earlier versions have given.
                foreach_mul_([gradient for _, gradient, *_ in tensors], factor)
            elif factor != 1.0:
                # The operator divides, and saves a pass over the gradients.
                scale = torch.full_like(step, 1.0 / factor)
            # Without copies in fp32, no memory needs to be limited.
            limit = PIECE if stores_bf16(config) else None
            for weights, gradients, *moments in split_batches(tensors, limit):
                with open_in_fp32(moments[0]) as first, open_in_fp32(moments[1]) as second:
                    fused_adamw_(
                        *(weights, gradients, first, second, [], [step] * len(weights)),
                        amsgrad=False,
                        beta1=config.adam_beta1,
                        beta2=config.adam_beta2,
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                        eps=group["eps"],
                        maximize=False,
                        grad_scale=scale,
                        # The operator changes nothing where this flag of torch's GradScaler is 1.
                        found_inf=None if dropped is None else dropped.float(),
                    )


def compute_squared_norm(tensors: list[Tensor], device: torch.device | None = None) -> Tensor:
    """Return the sum of squares of all elements, a scalar in fp64 on their device.

    On the CPU, torch's norm of a matrix adds up all squares one after the other in fp32. For a word
    embedding the result was wrong by 2e-5, and the error depended on the sharding. Rows are short,
    so their norms are accurate to 1e-8. Their squares are added in fp64 (docs/decisions/005).

    Args:
        tensors: Tensors of one device.
        device: Device of the result if there are no tensors. None: the CPU.
    """
    if not tensors:
        # A zero of the CPU would have to be copied to the GPU, and the host would wait for it.
        return torch.zeros((), dtype=torch.float64, device=device)
    # A GPU adds up many partial sums in parallel, so it does not have this error.
    if tensors[0].is_cuda:
        norms = list(foreach_norm(tensors))
    else:
        rows = [torch.linalg.vector_norm(t, dim=-1) for t in tensors]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64) for r in rows]
    return torch.stack(norms).double().square().sum()


def count_zeros(tensors: list[Tensor], device: torch.device | None = None) -> Tensor:
    """Return the number of zeros among all elements, a scalar in fp64 on their device.

    See `compute_squared_norm` for the arguments.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([t.numel() - torch.count_nonzero(t) for t in tensors]).double().sum()
