"""One training step of one rank of the real layout, typed, and assertions on its update.

`spmd_types` derives nothing outside of the forward passes. There, every gradient must be added up
over the ranks that have a part of it, once, and divided by the data x context ranks. Every
parameter must be in the norm once. The loss, the norm, counts of tokens and statistics must be
added up over all ranks, once.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from spmd_types import SpmdTypeError
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron.config.kernels import SWITCHES
from megatron.engine import native
from megatron.engine.native import NativeEngine
from megatron.engine.optimizer import MasterParameter
from megatron.extras.planner.dry_run.fake_rank import (
    list_parameter_groups,
    make_batch,
    name_groups,
    use_rank,
)
from megatron.extras.planner.dry_run.process import choose_fake_kernels, choose_microbatches
from megatron.extras.planner.dry_run.record import find_line_of_error
from megatron.extras.planner.types.check import RankTypes
from megatron.extras.planner.types.forward import (
    Axis,
    ForwardTypes,
    Offsets,
    keep_types_in_hooks,
    list_axes,
    list_offsets,
)
from megatron.extras.planner.types.messages import GradientFlow, Label, Recorder, Sent
from megatron.model.gpt import WORD_EMBEDDING
from megatron.parallel import mesh
from megatron.parallel.mesh import DataSharding, Mesh
from megatron.plan.run_plan import Plan

LOSS = "loss"
NORM = "squared norm"
STATISTICS = "statistics of experts"
TOKENS = "counted tokens"


@dataclass
class UpdateChecks:
    """The assertions on one rank, for a step of an engine."""

    _engine: NativeEngine
    _mesh: Mesh
    _found: RankTypes
    _recorder: Recorder
    _flow: GradientFlow
    _passes: int
    """Microbatches that are computed."""
    _reductions: dict[int, list[Sent]] = field(default_factory=dict)
    """FSDP2's group of parameters -> what its backward passes have sent."""

    def __post_init__(self) -> None:
        """Find the groups of this rank."""
        grid = self._mesh.grid
        self._world = list_offsets(dist.group.WORLD if grid.world_size > 1 else None)
        self._tensor = list_offsets(self._mesh.tensor_parallel.group)

    def _report(self, text: str) -> None:
        self._found.problems.append(text)

    def _count(self, what: str) -> None:
        self._found.checked[what] += 1

    # -- FSDP2 ------------------------------------------------------------------------------------

    def _get_sharding(self, *, by_expert: bool) -> DataSharding:
        experts = self._mesh.expert_parallel
        if by_expert and experts is not None:
            return experts.sharding
        return self._mesh.sharding

    def _check_reductions(self) -> dict[str, tuple[Offsets, ...]]:
        """Check what FSDP2 has sent.

        Returns:
            Parameter of a stage -> the groups over which its gradient was averaged.
        """
        averaged = {}
        for number, stage in enumerate(self._engine._rank_stages):
            if stage.sharded is None:
                continue
            for module in stage.sharded._sharded:
                for group in list_parameter_groups(module):
                    names = [each._param_fqn for each in group.fsdp_params]
                    by_expert = bool(names) and stage.specs[names[0]].by_expert
                    sharding = self._get_sharding(by_expert=by_expert)
                    # ZeRO 1 accumulates until the last microbatch.
                    times = 1
                    if stage.sharded._reduces_always:
                        times = self._passes
                    sent = self._reductions.get(id(group), [])
                    done = self._check_group(names, sharding, sent, times)
                    averaged.update({f"{number} {name}": done for name in names})
        return averaged

    def _check_group(
        self, names: list[str], sharding: DataSharding, sent: list[Sent], times: int
    ) -> tuple[Offsets, ...]:
        assert sharding.mesh is not None, "several ranks have a mesh"
        shards = list_offsets(sharding.mesh.get_group())
        copies = list_offsets(sharding.replicas)
        expected: Counter[Sent] = Counter()
        if len(shards) > 1:
            expected["reduce_scatter", shards, "AVG"] = times
        if len(copies) > 1:
            expected["all_reduce", copies, "AVG"] = 1
        # Shards of one rank are sent nowhere, and gathers of weights are not sums.
        found = Counter(each for each in sent if len(each[1]) > 1 and each[0] != "all_gather")
        self._count("reductions of FSDP2")
        if names and found != expected:
            self._report(
                f"the gradients of {names[0]} and {len(names) - 1} others: FSDP2 sends "
                f"{_describe(found)}, and must send {_describe(expected)}"
            )
        return tuple(group for group in (shards, copies) if len(group) > 1)

    def _watch_backward(self, post_backward: Callable[..., Any]) -> Any:
        def run(group: Any, *unused: Any) -> Any:
            with self._recorder.watch() as messages:
                out = post_backward(group, *unused)
            self._reductions.setdefault(id(group), []).extend(messages)
            return out

        return run

    # -- gradients --------------------------------------------------------------------------------

    def _name_masters(self) -> dict[str, MasterParameter]:
        """Return a unique name of each parameter of this rank's stages -> its master."""
        names = [
            f"{number} {name}"
            for number, stage in enumerate(self._engine._rank_stages)
            for name in stage.specs
        ]
        return dict(zip(names, self._engine._masters, strict=True))

    def begin_update(self, loss: Tensor) -> None:
        """Label the gradients and sums before they are reduced."""
        self._flow.clear()
        averaged = self._check_reductions()
        self._averaged = averaged
        for name, master in self._name_masters().items():
            gradient = master.model_parameter.grad
            if gradient is None:
                self._report(f"{master.name} has no gradient")
                continue
            local = self._engine._get_local_tensor(gradient)
            sums = averaged.get(name, ())
            factor = 1 / math.prod(map(len, sums))
            if local.numel():
                self._flow.mark(local, name, sums=sums, factor=factor)
        # The host must read these after a sum over all ranks only.
        self._flow.mark(loss, LOSS)
        for router in self._engine._experts._routers:
            self._flow.mark(router.counts, STATISTICS)
            self._flow.mark(router.sums, STATISTICS)

    def check_gradients(self) -> None:
        """Check the gradients that the optimizer is about to use."""
        for name, master in self._name_masters().items():
            gradient = master.weight.grad
            assert gradient is not None, "the optimizer needs gradients"
            self._count("gradients")
            # FSDP2's last shards of a small parameter are empty.
            if gradient.numel() == 0:
                continue
            labels = self._flow.find(gradient)
            if [label.name for label in labels] != [name]:
                self._report(f"{master.name}: the optimizer gets another gradient than its own")
                continue
            self._check_gradient(name, master, labels[0])

    def _check_gradient(self, name: str, master: MasterParameter, label: Label) -> None:
        spec = master.spec
        ranks = self._mesh.grid.weight_ranks
        sums = Counter(label.sums)
        expected = Counter(self._averaged.get(name, ()))
        tensor = len(self._tensor) > 1
        equal = tensor and not (spec.partial_gradient or spec.is_sharded or spec.by_expert)
        if equal and sums[self._tensor] > expected[self._tensor]:
            # The sum of the first rank's value and zeros keeps replicas equal.
            if label.zeroed != (self._mesh.coordinate.tensor != 0):
                self._report(
                    f"{master.name}: its gradient is equal on all tensor-parallel ranks (I), and "
                    "is added up over them"
                )
            expected[self._tensor] += 1
        elif spec.partial_gradient and tensor:
            # P becomes I.
            expected[self._tensor] += 1
        tied = not self._engine._plan.config.model.untie_embeddings_and_output_weights
        if tied and master.name == WORD_EMBEDDING and self._mesh.ends is not None:
            expected[list_offsets(self._mesh.ends)] += 1
        for group in sorted({*sums, *expected}, key=len):
            if sums[group] != expected[group]:
                self._report(
                    f"{master.name}: its gradient is added up {sums[group]} times over the "
                    f"{self._name(group)}, and must be {expected[group]} times"
                )
        if not math.isclose(label.factor * ranks, 1):
            self._report(
                f"{master.name}: its gradient is divided by {1 / label.factor:g}, and must be by "
                f"{ranks}, the data x context ranks"
            )

    def _name(self, ranks: Offsets) -> str:
        sharding = self._mesh.sharding
        experts = self._mesh.expert_parallel
        names = {
            "tensor-parallel ranks": self._tensor,
            "first and last stage": list_offsets(self._mesh.ends),
        }
        for name, each in (
            ("shards", sharding),
            *([("equal experts", experts.sharding)] if experts else []),
        ):
            if each.mesh is not None:
                names[name] = list_offsets(each.mesh.get_group())
            names[f"copies of {name}"] = list_offsets(each.replicas)
        found = [name for name, group in names.items() if group == ranks]
        return f"{[*found, 'group'][0]} ({len(ranks)} ranks)"

    # -- sums -------------------------------------------------------------------------------------

    def _list_expected(self, mesh: Mesh) -> set[str]:
        """Return the parameters that exactly this one of all ranks with equal elements counts."""
        counted = set()
        for name, master in self._name_masters().items():
            spec = master.spec
            if master.weight.numel() == 0 or spec.copy_of is not None:
                continue
            if spec.by_expert:
                experts = mesh.expert_parallel
                first = experts is None or experts.sharding.copy == 0
            else:
                first = mesh.sharding.copy == 0
                first = first and (spec.is_sharded or mesh.coordinate.tensor == 0)
            if first:
                counted.add(name)
        return counted

    def _compare_counted(self, names: list[str], mesh: Mesh) -> None:
        self._count("parameters in the norm")
        expected = Counter(self._list_expected(mesh))
        for name in sorted({*names, *expected}):
            times = names.count(name)
            if times != expected[name]:
                self._report(
                    f"{name.partition(' ')[2]}: the norm of {mesh.coordinate}, copy "
                    f"{mesh.sharding.copy} counts it {times} times, and must {expected[name]} times"
                )

    def check_all_coordinates(self) -> None:
        """Check what the norm counts at the corners of the grid, in place of this rank."""
        mesh = self._mesh
        experts = mesh.expert_parallel
        last = (mesh.grid.tensor - 1, mesh.sharding.copies - 1)
        masters = {id(master): name for name, master in self._name_masters().items()}
        for tensor, copy in product(*({0, each} for each in last)):
            corner = replace(
                mesh,
                coordinate=replace(mesh.coordinate, tensor=tensor),
                sharding=replace(mesh.sharding, copy=copy),
            )
            if experts is not None:
                # There may be fewer copies of the experts than of other weights.
                of_experts = replace(experts.sharding, copy=min(copy, experts.sharding.copies - 1))
                corner = replace(corner, expert_parallel=replace(experts, sharding=of_experts))
            with patch.object(self._engine, "_mesh", corner):
                # The engine has a list for its own corner only.
                counted = [each for each in self._engine._masters if self._engine._is_counted(each)]
            self._compare_counted([masters[id(each)] for each in counted], corner)

    def check_reads(self) -> None:
        """Check the sums that the host has read."""
        ranks = self._mesh.grid.weight_ranks * self._mesh.grid.tensor
        for name in (LOSS, NORM, STATISTICS):
            labels = [label for label in self._flow.read if label.name == name]
            if labels or name != STATISTICS:
                self._check_once(labels, name)
            for label in labels:
                if name == LOSS and not math.isclose(label.factor * ranks, 1):
                    self._report(
                        f"the loss is divided by {1 / label.factor:g}, and must be by {ranks}"
                    )

    def _check_once(self, labels: list[Label], name: str) -> None:
        """Check that a sum over all ranks was made once."""
        once: tuple[Offsets, ...] = ()
        if len(self._world) > 1:
            once = (self._world,)
        self._count(f"sums over all ranks: {name}")
        if not labels:
            self._report(f"the host does not read the {name}, which all ranks must add up")
        for sums in {label.sums for label in labels} - {once}:
            groups = " and ".join(f"{len(group)} ranks" for group in sums) or "no group"
            self._report(
                f"the {name} is added up over {groups}, and must be once over all "
                f"{len(self._world)} ranks"
            )

    @contextmanager
    def install(self) -> Iterator[None]:
        """Check the step that is run meanwhile."""
        apply = NativeEngine._apply_gradients
        norm = native.compute_squared_norm
        count = NativeEngine._count_tokens
        build = NativeEngine._build_inputs

        def apply_gradients(engine: Any, loss: Tensor, *args: Any) -> Any:
            self.begin_update(loss)
            return apply(engine, loss, *args)

        def compute_norm(tensors: list[Tensor], *args: Any) -> Tensor:
            # The labels say which parameters the tensors belong to.
            names = [label.name for tensor in tensors for label in self._flow.find(tensor)]
            self._compare_counted(names, self._mesh)
            out = norm(tensors, *args)
            self._flow.mark(out, NORM)
            return out

        def count_tokens(engine: Any, *args: Any, **options: Any) -> Tensor:
            counted = count(engine, *args, **options)
            self._flow.mark(counted, TOKENS)
            return counted

        def build_inputs(engine: Any, *args: Any, **options: Any) -> Any:
            inputs = build(engine, *args, **options)
            if engine._counted_tokens is not None:
                self._check_once(self._flow.find(engine._counted_tokens), TOKENS)
                self._flow.clear()
            return inputs

        # The engine calls it when the gradients are complete, before the optimizer.
        self._engine._before_update = self.check_gradients
        with ExitStack() as stack:
            stack.enter_context(patch.object(NativeEngine, "_apply_gradients", apply_gradients))
            stack.enter_context(patch.object(native, "compute_squared_norm", compute_norm))
            stack.enter_context(patch.object(NativeEngine, "_count_tokens", count_tokens))
            stack.enter_context(patch.object(NativeEngine, "_build_inputs", build_inputs))
            run = self._watch_backward(FSDPParamGroup.post_backward)
            stack.enter_context(patch.object(FSDPParamGroup, "post_backward", run))
            yield


def _describe(messages: Counter[Sent]) -> str:
    parts = [
        f"{times} x {kind} {operation} over {len(ranks)} ranks"
        for (kind, ranks, operation), times in messages.items()
    ]
    return " and ".join(parts) or "nothing"


def use_plain_operators(plan: Plan) -> Plan:
    """Return the plan without compilation, fused kernels and float8, which have no types."""
    off: dict[str, Any] = dict.fromkeys(("use_torch_compile", *SWITCHES), False)
    kernels = replace(plan.config.kernels, **off)
    precision = replace(plan.config.precision, fp8_format=None)
    config = replace(plan.config, kernels=kernels, precision=precision)
    return choose_fake_kernels(replace(plan, config=config))


def run_typed_rank(plan: Plan, rank: int, kind: str) -> RankTypes:
    """Run a step of a rank on the fake GPU of this process, and return what was found."""
    coordinate = plan.grid.get_coordinate(rank)
    found = RankTypes(rank, str(coordinate), coordinate.pipeline, kind)
    plan = use_plain_operators(plan)
    microbatches = choose_microbatches(plan)
    if plan.pipeline_size == 1:
        # The first one accumulates, and the last one reduces.
        microbatches = min(microbatches, 2)
    last = microbatches - 1
    flow = GradientFlow()
    axes = list_axes(plan.grid)
    # Its keys are groups of an earlier rank, which do not exist any more.
    list_offsets.cache_clear()
    # The ranks' names are the same text on a fake group. Receiving it from 16,384 ranks takes 2 s.
    names = patch.object(mesh, "gather_json", lambda value, group: [value] * plan.world_size)
    try:
        with keep_types_in_hooks(), names, use_rank(plan, rank) as built:
            engine = built.engine
            types = ForwardTypes(built.mesh, axes)
            recorder = Recorder(found, flow, name_groups(built.mesh, engine))
            checks = UpdateChecks(engine, built.mesh, found, recorder, flow, min(microbatches, 2))
            # After the construction, in which FSDP2 has made the parameters that layers use.
            for stage in engine._rank_stages:
                types.type_parameters(stage)
                for name, spec in stage.specs.items():
                    found.gradients[spec.get_global_name(name)] = types.find_type(spec)
            batch = plan.config.batch
            samples = make_batch(microbatches, batch.micro_batch_size, plan.config.model.seq_length)
            with (
                types.install(),
                recorder.install(lambda number: 0 < number < last),
                checks.install(),
                recorder,
            ):
                built.train(samples)
                checks.check_reads()
                checks.check_all_coordinates()
            found.checked.update(types.checked)
    except Exception as error:
        # A rank that fails is a result. The other ranks may fail in another way.
        found.problems.append(_describe_error(error, axes))
    return found


def _describe_error(error: BaseException, axes: Sequence[Axis]) -> str:
    """Return an error with the innermost line of the package that it comes from."""
    # torch's pipeline raises an error of its own from ours.
    while error.__cause__ is not None:
        error = error.__cause__
    line = find_line_of_error(error)
    where = ""
    if line is not None:
        where = f"{line}: "
    if not isinstance(error, SpmdTypeError):
        return f"{where}{type(error).__name__}: {error}"
    # Without its proposals, which name functions of spmd_types.
    text = re.split(r"\nAre you missing|\n\nSet SPMD", str(error.args[0]))[0]
    if error.context:
        text = f"{text} {' '.join(error.context.split())}"
    for axis in axes:
        text = text.replace(repr(axis.mesh), axis.name)
    return f"{where}{text}"
