"""Types of a stage's forward pass, which `spmd_types` derives operator by operator.

The core declares its autograd Functions (`parallel/spmd.py`). Parameters, inputs and messages
between stages get their types here. FSDP2's hooks are not typed, see `messages.py`.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from spmd_types import (
    I,
    MeshAxis,
    R,
    SpmdTypeError,
    V,
    assert_type,
    get_local_type,
    no_typecheck,
    register_autograd_function,
    set_current_mesh,
)
from spmd_types._checker import infer_local_type_for_axis
from spmd_types._raw_dist import RAW_DIST_RULES
from spmd_types.checker import typecheck
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_leaves

from megatron.engine.parallelize import RankStage
from megatron.extras.planner.dry_run.fake_rank import list_parameter_groups
from megatron.model import goldfish
from megatron.model.dropout import Dropout
from megatron.model.experts.routing import list_routers
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.spmd import DECLARED, OUTSIDE, SpmdRule

LETTERS = {"I": I, "R": R, "V": V}
Offsets = frozenset[int]
"""The ranks of a group, as differences to its first one."""


@dataclass(frozen=True)
class Axis:
    """An axis with several ranks."""

    name: str
    mesh: MeshAxis
    offsets: Offsets

    def is_in(self, group: Offsets) -> bool:
        """Return whether a group has all ranks of the axis."""
        return self.offsets <= group

    def shares(self, group: Offsets) -> bool:
        """Return whether a group has several ranks of the axis."""
        return len(self.offsets & group) > 1


def list_axes(grid: Grid) -> list[Axis]:
    """Return the axes of a stage that have several ranks. A pipeline has no common tensors."""
    sizes = {"tensor": grid.tensor, "context": grid.context, "data": grid.data}
    axes = []
    # Tensor is the innermost axis, then context and data (`Grid`).
    stride = 1
    for name, size in sizes.items():
        if size > 1:
            ranks = frozenset(range(0, size * stride, stride))
            axes.append(Axis(name, MeshAxis.of(size, stride), ranks))
        stride *= size
    return axes


@cache
def list_offsets(group: dist.ProcessGroup | None) -> Offsets:
    """Return the offsets of a group. None: that of one rank."""
    if group is None:
        return frozenset((0,))
    ranks = dist.get_process_group_ranks(group)
    # All groups of a kind have the same offsets, on each rank.
    return frozenset(rank - ranks[0] for rank in ranks)


def choose_variant(text: str, group: Any) -> str:
    """Return the part of a declared text that holds for a group."""
    plain, slash, sharded = text.partition("/")
    # Only tensor-parallel ranks may have a sharded sequence.
    if slash and getattr(group, "sequence_parallel", False):
        return sharded
    return plain


def find_group(rule: SpmdRule, given: Mapping[str, Any]) -> Any:
    """Return the group of a call, or None if it has no message."""
    if rule.group is None:
        return None
    name, _, attribute = rule.group.partition(".")
    group = given[name]
    if attribute:
        # The group is part of a message between two Functions.
        return getattr(group, attribute)
    return group


def list_ranks(group: Any) -> Offsets:
    """Return the ranks of what `find_group` returned."""
    if group is None:
        return list_offsets(None)
    return list_offsets(group.group)


class ForwardTypes:
    """Types the forward passes of a rank."""

    def __init__(self, mesh: Mesh, axes: list[Axis]) -> None:
        """Type over these axes."""
        self._mesh = mesh
        self._axes = axes
        self.checked: Counter[str] = Counter()

    # -- types at the borders ---------------------------------------------------------------------

    def _make_type(self, tensor: str, others: str) -> dict[Any, Any]:
        return {a.mesh: LETTERS[tensor if a.name == "tensor" else others] for a in self._axes}

    def find_type(self, spec: ParameterSpec) -> dict[str, str]:
        """Return the type of a parameter over each axis, as FSDP2 gathers it."""
        experts = self._mesh.expert_parallel
        found = {}
        for axis in self._axes:
            if spec.by_expert:
                assert experts is not None, "a model with experts has their ranks"
                # Rows of experts come from all ranks, so they are V over each axis. Ranks that
                # have equal experts are no axis, and `typed_rank.py` checks their sums.
                found[axis.name] = "R"
                if axis.shares(list_offsets(experts.group)):
                    found[axis.name] = "V"
            elif axis.name != "tensor" or spec.partial_gradient:
                # Each rank has a part of the sum that is the gradient.
                found[axis.name] = "R"
            else:
                found[axis.name] = "I"
                if spec.is_sharded:
                    found[axis.name] = "V"
        return found

    def type_parameters(self, stage: RankStage) -> None:
        """Give the parameters that the layers use their types."""
        parameters = dict(stage.model.named_parameters())
        if stage.sharded is not None:
            parameters = {
                each._param_fqn: each.unsharded_param
                for module in stage.sharded._sharded
                for group in list_parameter_groups(module)
                for each in group.fsdp_params
            }
        for name, parameter in parameters.items():
            types = self.find_type(stage.specs[name])
            _set_type(parameter, {a.mesh: LETTERS[types[a.name]] for a in self._axes})

    def run_stage(
        self, forward: Callable[..., Tensor], model: GPT, x: Tensor | None, inputs: Inputs
    ) -> Tensor:
        """Run and type a forward pass of a stage."""
        border = self._make_type(choose_variant(OUTSIDE, model.tp), "V")
        # spmd_types requires a type over each of the axes.
        axes = {axis.name: axis.mesh for axis in self._axes}
        with set_current_mesh(axes), typecheck(strict_mode="strict"):
            for field in fields(inputs):
                value = getattr(inputs, field.name)
                if isinstance(value, Tensor):
                    _set_type(value, self._make_type("R", "V"))
            if x is not None:
                _set_type(x, border)
            for router in list_routers(model):
                _set_type(router.balance, self._make_type("R", "R"))
                # They add up what this rank's tokens have chosen.
                _set_type(router.counts, self._make_type("V", "V"))
                _set_type(router.sums, self._make_type("V", "V"))
            out = forward(model, x, inputs)
            # Each data rank has a part of the loss. FSDP2 averages the gradients over them.
            expected = border
            if model.head is not None:
                expected = self._make_type("I", "V")
            assert_type(out, expected)
            self.checked["forward passes of stages"] += 1
        return out

    # -- autograd Functions -----------------------------------------------------------------------

    def _run_function(self, function: Any, rule: SpmdRule, *arguments: Any) -> Any:
        """Run a declared Function, check the types of its arguments, and type its results."""
        given = inspect.signature(function.forward).bind(None, *arguments).arguments
        # The mode of types is off here, so the operators inside have no types.
        result = function.apply(*arguments)
        group = find_group(rule, given)
        ranks = list_ranks(group)
        types = {}
        for axis in self._axes:
            if rule.out is not None and axis.shares(ranks):
                for name, letter in rule.inputs.items():
                    expected = choose_variant(letter, group)
                    for tensor in tree_leaves(given[name]):
                        if isinstance(tensor, Tensor):
                            _require(function, name, tensor, axis, expected)
                types[axis.mesh] = LETTERS[choose_variant(rule.out, group)]
            else:
                types[axis.mesh] = _infer(function, axis, list(given.values()))
        for out in tree_leaves(result):
            _set_type(out, types)
        self.checked[f"calls of {function.__name__.removeprefix('_')}"] += 1
        return result

    # -- collectives without a gradient -----------------------------------------------------------

    def _run_collective(self, kind: str, *, sums: bool) -> Callable[..., None]:
        def type_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            # The result is written into the first argument. A sum has no other tensor.
            out, *rest = given.arguments.values()
            sent = next((each for each in rest if isinstance(each, Tensor)), out)
            types = dict(get_local_type(sent))
            ranks = list_offsets(given.arguments["group"] or dist.group.WORLD)
            for axis in self._axes:
                if not axis.shares(ranks):
                    continue
                if (
                    sums
                    and given.arguments["op"] == dist.ReduceOp.SUM
                    and types[axis.mesh] is not V
                ):
                    raise SpmdTypeError(f"{kind} adds up equal tensors over the {axis.name} ranks")
                if kind != "all_to_all":
                    # A group of experts may have a part of an axis. Other parts have other values.
                    types[axis.mesh] = V
                    if axis.is_in(ranks):
                        types[axis.mesh] = R
            _set_type(out, types)

        return type_result

    @contextmanager
    def install(self) -> Iterator[None]:
        """Type the forward passes of stages meanwhile."""
        stage_forward = GPT.forward
        # Without its cache, which would keep a tensor with the types of another plan.
        goldfish_table = goldfish._make_table.__wrapped__
        rules = {
            dist.all_reduce: self._run_collective("all_reduce", sums=True),
            dist.all_gather_into_tensor: self._run_collective("all_gather", sums=False),
            dist.all_to_all_single: self._run_collective("all_to_all", sums=False),
        }
        single = getattr(dist, "all_gather_single", None)
        if single is not None:
            rules[single] = rules[dist.all_gather_into_tensor]

        def forward(model: GPT, x: Tensor | None, inputs: Inputs) -> Tensor:
            if not torch.is_grad_enabled():
                # The construction of FSDP2's shards runs one without a meaning.
                return stage_forward(model, x, inputs)
            return self.run_stage(stage_forward, model, x, inputs)

        def make_table(device: torch.device) -> Tensor:
            with no_typecheck():
                table = goldfish_table(device)
            # Its numbers are random, and drawn from a constant seed.
            _set_type(table, self._make_type("R", "R"))
            return table

        def drop(dropout: Dropout, x: Tensor, residual: Tensor | None, *rest: Any) -> Tensor:
            # Masks are trusted, and a factor has the same types.
            if residual is None:
                return 2.0 * x
            return residual + 2.0 * x

        with ExitStack() as stack:
            stack.enter_context(patch.object(Dropout, "drop", drop))
            stack.enter_context(patch.dict(RAW_DIST_RULES, rules))
            stack.enter_context(patch.object(goldfish, "_make_table", make_table))
            stack.enter_context(patch.object(GPT, "forward", forward))
            for function, rule in DECLARED.items():
                run = staticmethod(partial(self._run_function, function, rule))
                stack.enter_context(patch.object(function, "typecheck_forward", run, create=True))
                register_autograd_function(function)
            yield


@contextmanager
def keep_types_in_hooks() -> Iterator[None]:
    """Let FSDP2's hooks of modules that are sharded meanwhile leave types as they are."""
    with ExitStack() as stack:
        for name in ("_pre_forward", "_post_forward"):
            hook = _keep_types(getattr(FSDPState, name))
            stack.enter_context(patch.object(FSDPState, name, hook))
        yield


def _keep_types(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of FSDP2 that leaves its tensors' types as they are."""

    def run(state: Any, module: Any, *given: Any) -> Any:
        with no_typecheck():
            made = hook(state, module, *given)
        # It puts nodes of its own into the graph, whose results are other objects.
        tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        results = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        last = tensors[len(tensors) - len(results) :]
        for before, after in zip(last, results, strict=True):
            if get_local_type(before):
                _set_type(after, get_local_type(before))
        return made

    return run


def _set_type(tensor: Any, types: Mapping[Any, Any]) -> None:
    if isinstance(tensor, Tensor):
        # `assert_type` would compare it with an earlier type instead of replacing it.
        tensor._local_type = dict(types)  # type: ignore[attr-defined]


def _require(function: Any, name: str, tensor: Tensor, axis: Axis, expected: str) -> None:
    found = get_local_type(tensor).get(axis.mesh)
    if found is not LETTERS[expected]:
        raise SpmdTypeError(
            f"`{name}` of {function.__name__} is {found} over the {axis.name} ranks, and it must "
            f"be {expected}"
        )


def _infer(function: Any, axis: Axis, arguments: list[Any]) -> Any:
    """Return the type of an operator without messages over an axis."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    # The rules of spmd_types for an operator without messages that is not linear.
    types: list[Any] = [get_local_type(each).get(axis.mesh) for each in tensors]
    if None in types:
        raise SpmdTypeError(f"an argument of {function.__name__} has no type over {axis.name}")
    no_grad = [not each.requires_grad for each in tensors]
    return infer_local_type_for_axis(axis.mesh, types, no_grad=no_grad)
