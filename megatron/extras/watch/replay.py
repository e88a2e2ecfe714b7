"""The comparison of --replay-interval: which rank computes other numbers from the same inputs.

All ranks compute the first microbatch of a step twice, before the step. The passes have the same
weights, tokens and dropout keys, so each tensor must have the same bits. If one differs, a third
pass decides: the pass that differs from the two others was wrong.

If all three differ on all ranks, a kernel does not repeat its bits. Later comparisons then allow
the differences that such passes have had.

A `Pass` has an entry for each collective and message, for the output of each block, for the
gradient of each output, and for each gradient of a parameter. The digest of a collective is that of
this rank's input. After a collective, an error of one rank is on all of them.

An error spreads with collectives and messages, so many ranks differ at the end. The entries of the
ranks are ordered by dependence: an entry depends on all earlier ones of its rank, and on what the
other members of earlier collectives have sent. The first entry that differs depends on none that
differs.

The invariant: only the order of the entries within a rank and within a group counts. Clocks and
counters of different ranks are not compared.
"""

import contextlib
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from megatron.base.errors import ConfigError, FaultyHostError
from megatron.base.plain_text import format_count
from megatron.data.batches import Microbatch
from megatron.engine.base import Engine
from megatron.engine.invariants import compute_checksum
from megatron.engine.native import NativeEngine
from megatron.extras.step.cuda_graph import CapturedRunner
from megatron.extras.watch.operator_mode import CollectiveCall, OperatorMode
from megatron.model.gpt import GPT
from megatron.parallel.mesh import Mesh
from megatron.parallel.messages import gather_json
from megatron.run.parts import Printer, Replay

_SLICE = 1 << 22
"""Elements whose projections are computed at a time."""
MEASURES = 4
"""The measures of a tensor: its norm, its sum and two projections."""
EXCLUDES: dict[str, bool | None] = {"warn": None, "stop": False, "exclude": True}
"""Value of --replay-action -> whether a host is excluded when the run ends. None: it goes on."""
_CALIBRATIONS = 4
"""Passes that measure how far a kernel that does not repeat differs from itself."""
_MARGIN = 8.0
"""Factor by which a later difference may exceed the largest one of these passes."""


@dataclass(frozen=True)
class Entry:
    """An event in a pass: a tensor whose digest was taken, or a message that arrived."""

    label: str
    """Where in the model it is, and what it is."""
    link: str = ""
    """The group of a collective, or the two ends of a message. Empty within a rank."""
    sends: bool = True
    """Whether the link carries numbers of this rank."""
    receives: bool = False
    """Whether later entries depend on numbers that the link has brought."""


@dataclass
class Pass:
    """The entries of one pass, in the order of the program, with their digests."""

    entries: list[Entry] = field(default_factory=list)
    digests: list[Tensor] = field(default_factory=list)
    """int64[2] for each entry. It is zero where nothing is sent."""
    measures: list[Tensor] = field(default_factory=list)
    """fp64[MEASURES] for each entry, or empty if they were not asked for."""

    def to_host(self) -> None:
        """Copy digests and measures to host memory, in two copies."""
        self.digests = list(torch.stack(self.digests).cpu()) if self.digests else []
        self.measures = list(torch.stack(self.measures).cpu()) if self.measures else []


class PassRecorder:
    """Records passes of a rank's stages."""

    def __init__(self, device: torch.device, *, with_measures: bool) -> None:
        """Create a recorder.

        Args:
            device: The device that computes. Messages may be in host memory.
            with_measures: Whether to compute measures too. They show how far two passes differ.
        """
        self._device = device
        self._with_measures = with_measures
        self._place = "before the layers"
        self.result = Pass()

    @contextlib.contextmanager
    def record(self, stages: Sequence[GPT]) -> Iterator[None]:
        """Record what is computed within this context."""
        # The hooks exist only in a replay. A step pays nothing for them.
        hooks: list[RemovableHandle] = []
        for stage in stages:
            for number, block in stage.get_blocks().items():
                # Layers are numbered from 1 in messages.
                hooks += self._watch(block, f"layer {number + 1}")
        try:
            with _create_masks_without_modes(stages), _CollectiveMode(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self.result.to_host()

    def _watch(self, block: torch.nn.Module, name: str) -> list[RemovableHandle]:
        def enter(*_: Any) -> None:
            self._place = f"forward pass of {name}"

        def leave(_module: Any, _inputs: Any, output: Tensor) -> None:
            self.add(f"output of {name}", output)
            self._place = f"after {name}"
            if output.requires_grad:
                output.register_hook(enter_backward)

        def enter_backward(gradient: Tensor) -> None:
            self._place = f"backward pass of {name}"
            self.add(f"gradient of the output of {name}", gradient)

        return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]

    def add(self, label: str, tensor: Tensor) -> None:
        """Add a tensor of this rank that no other rank has changed since its last entry."""
        self._append(Entry(label), [tensor])

    def add_link(self, operator: str, link: str, sent: Sequence[Tensor], *, receives: bool) -> None:
        """Add a collective or a message, with what this rank sends."""
        entry = Entry(f"{operator}, {self._place}", link, sends=bool(sent), receives=receives)
        self._append(entry, sent)

    @torch.no_grad()
    def _append(self, entry: Entry, tensors: Sequence[Tensor]) -> None:
        # A digest reads the elements in the order of memory.
        contiguous = [tensor.detach().contiguous() for tensor in tensors]
        self.result.entries.append(entry)
        self.result.digests.append(self._sum_up(compute_checksum, contiguous, 2, torch.int64))
        if self._with_measures:
            self.result.measures.append(
                self._sum_up(compute_measures, contiguous, MEASURES, torch.float64)
            )

    def _sum_up(
        self,
        compute: Callable[[Tensor], Tensor],
        tensors: Sequence[Tensor],
        size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a weighted sum of a function's values, [size]. It depends on the order."""
        total = torch.zeros(size, dtype=dtype, device=self._device)
        for number, tensor in enumerate(tensors):
            # An odd factor loses no bit of an integer, and differs for each place.
            total += (2 * number + 1) * compute(tensor).to(self._device, non_blocking=True)
        return total


def compute_measures(tensor: Tensor) -> Tensor:
    """Return the norm, the sum, and projections on two fixed vectors of 1 and -1, fp64[MEASURES].

    A change of one element changes the sum and each projection by its size.
    """
    total = torch.zeros(MEASURES, dtype=torch.float64, device=tensor.device)
    # Bytes and integers have no rounding, but a pass needs a measure for each entry.
    if not tensor.is_floating_point():
        tensor = tensor.float()
    for number, part in enumerate(tensor.reshape(-1).split(_SLICE)):
        numbers = part.double()
        places = torch.arange(len(part), device=part.device) + number * _SLICE
        # Knuth's multiplicative hash. Two bits of it are two vectors of signs.
        hashed = places * 2_654_435_761
        signs = [1 - 2 * ((hashed >> bit) & 1).double() for bit in (20, 27)]
        projections = [(numbers * sign).sum() for sign in signs]
        total += torch.stack([numbers.square().sum(), numbers.sum(), *projections])
    total[0].sqrt_()
    return total


@contextlib.contextmanager
def _create_masks_without_modes(stages: Sequence[GPT]) -> Iterator[None]:
    """Create the causal masks of context-parallel ranks outside of the recorder's mode.

    torch cannot create the tensors of its class `CausalBias` within a dispatch mode.
    """
    if all(stage.context.size == 1 for stage in stages):
        yield
        return
    # This import loads torch's compiler. Only shared sequences need it.
    from torch.nn.attention import bias

    create = bias.causal_lower_right

    def create_without_modes(*sizes: int) -> bias.CausalBias:
        with _disable_current_modes():
            return create(*sizes)

    bias.causal_lower_right = create_without_modes
    try:
        yield
    finally:
        bias.causal_lower_right = create


class _CollectiveMode(OperatorMode):
    """Adds each collective and message to a recorder before it is started."""

    def __init__(self, recorder: PassRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def see_collective(self, call: CollectiveCall) -> None:
        """Add the call, except one without numbers of the model."""
        group = call.group
        if call.kind == "barrier" or group is None:
            return
        is_message = call.kind in ("send", "receive")
        # torch's stages exchange an integer in the first pass of a new schedule only.
        if is_message and not call.tensors[0].is_floating_point():
            return
        # The name is the same on the group's ranks, and on no others.
        link = f"{call.group_name} of {'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        if is_message:
            ends = [group.rank(), call.peer]
            if call.kind == "receive":
                ends.reverse()
            link += f" from {ends[0]} to {ends[1]}"
        self._recorder.add_link(
            call.operator.strip("_"), link, call.sent, receives=call.kind != "send"
        )


@dataclass(frozen=True)
class RankDifference:
    """How the passes of one rank differ."""

    label: str
    """Where its first difference is."""
    received: dict[str, int]
    """Link -> how many messages of it have arrived before the first difference."""
    wrong: dict[str, int]
    """Link -> the index, from 0, of this rank's first message whose values differ."""


def describe_difference(entries: Sequence[Entry], differs: Sequence[bool]) -> RankDifference | None:
    """Return the difference of this rank, or None if no entry differs."""
    order = sort_messages(entries)
    first = next((number for number in order if differs[number]), None)
    if first is None:
        return None
    received: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    wrong: dict[str, int] = {}
    # Messages are counted to the end, because an error spreads with those after the first
    # difference.
    is_before = True
    for number in order:
        is_before = is_before and number != first
        link = entries[number].link
        if not link:
            continue
        if differs[number]:
            wrong.setdefault(link, passed[link])
        passed[link] += 1
        if is_before and entries[number].receives:
            received[link] = passed[link]
    return RankDifference(entries[first].label, dict(received), wrong)


def sort_messages(entries: Sequence[Entry]) -> list[int]:
    """Return the indices of the entries, with sends before the receives of the same batch.

    A schedule starts a send and a receive together. What it sends was computed before.
    """
    order: list[int] = []
    waiting: list[int] = []
    for number, entry in enumerate(entries):
        if entry.receives and not entry.sends:
            waiting.append(number)
            continue
        # Anything but a send may depend on what was received.
        if not (entry.link and entry.sends and not entry.receives):
            order += waiting
            waiting = []
        order.append(number)
    return order + waiting


def find_first_ranks(differences: Sequence[RankDifference | None]) -> list[int]:
    """Return the ranks whose first difference depends on no difference of another rank.

    Args:
        differences: The difference of each rank, or None if its passes agree.
    """
    # Link -> the ranks that sent wrong numbers over it, each with the index of the first message.
    senders: dict[str, list[tuple[int, int]]] = {}
    for rank, difference in enumerate(differences):
        if difference is not None:
            for link, number in difference.wrong.items():
                senders.setdefault(link, []).append((rank, number))
    first = []
    for rank, difference in enumerate(differences):
        if difference is None:
            continue
        # A message with an index below the count had arrived before the first difference.
        caused = any(
            sender != rank and number < count
            for link, count in difference.received.items()
            for sender, number in senders.get(link, ())
        )
        if not caused:
            first.append(rank)
    return first


class MicrobatchReplay(Replay):
    """Compares two passes of the first microbatch."""

    def __init__(
        self,
        action: Literal["warn", "stop", "exclude"],
        mesh: Mesh,
        engine: Engine,
        log: Printer,
    ) -> None:
        """Create a comparison in which all kernels are expected to repeat their bits.

        Args:
            action: The value of --replay-action.
            mesh: This rank's mesh.
            engine: The engine of the run.
            log: Prints a line on rank 0. A warning is also in the chronicle.

        Raises:
            ConfigError: The engine cannot compute a microbatch without a step.
        """
        if not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"--replay-interval: {type(engine).__name__} cannot compute a microbatch twice, as "
                "the engine of this package does. Leave out --replay-interval or --engine"
            )
        self._engine = engine
        self._excludes = EXCLUDES[action]
        self._mesh = mesh
        self._log = log
        self._bounds: Tensor | None = None
        """fp64[entries], what two passes may differ by. None: their bits are equal."""
        self._last_good: int | None = None
        self._agreed = 0
        """Replays of this launch that found no difference."""
        self._differed = 0

    def check(self, microbatches: Sequence[Microbatch], iteration: int) -> None:
        """Compare two passes. See `Replay.check`."""

        def compute() -> Pass:
            recorder = PassRecorder(self._mesh.device, with_measures=self._bounds is not None)
            kernels = _prefer_repeatable_kernels(self._engine, self._mesh.device)
            # torch cannot compile within the recorder's mode, and would raise an error.
            eager = torch.compiler.set_stance("force_eager")
            with kernels, eager, recorder.record(self._engine.stages):
                self._engine.compute_and_drop_gradients(microbatches, iteration, recorder.add)
            return recorder.result

        first, second = compute(), compute()
        # FSDP2 gathers once more in the first pass after a start.
        if any(gather_json(first.entries != second.entries, self._mesh.control)):
            first, second = second, compute()
        found = self._compare(first, second)
        if not any(found):
            if self._check_graphs(microbatches, iteration):
                self._record_agreement(iteration)
            else:
                self._differed += 1
            return
        # All ranks know what each has found, so all of them take the same path from here on.
        third = compute()
        ranks = find_first_ranks(found)
        labels = [each.label for each in (found[rank] for rank in ranks) if each is not None]
        wrong = self._find_wrong_pass(first, second, third)
        everyone = gather_json(wrong, self._mesh.control)
        passes = {everyone[rank] for rank in ranks}
        repeats = passes != {None} or not self._is_on_all_ranks(first, found, ranks)
        if not repeats and self._calibrate(compute, labels[0]):
            self._record_agreement(iteration)
            return
        self._differed += 1
        self._report(iteration, [(rank, found[rank], everyone[rank]) for rank in ranks])

    def _check_graphs(self, microbatches: Sequence[Microbatch], iteration: int) -> bool:
        """Return whether a pass that repeats a CUDA graph equals an eager one. True without graphs.

        Both use the kernels of a step. If those do not repeat their bits, eager passes show how far
        they differ.
        """
        runner = self._engine.runner
        if not isinstance(runner, CapturedRunner) or not runner.has_graphs:
            return True

        def compute(*, repeated: bool) -> Pass:
            recorder = PassRecorder(self._mesh.device, with_measures=True)
            with contextlib.nullcontext() if repeated else runner.pause():
                self._engine.compute_and_drop_gradients(microbatches, iteration, recorder.add)
            recorder.result.to_host()
            return recorder.result

        # The eager passes above have left the right values there.
        runner.spoil_gradients()
        repeated, eager = compute(repeated=True), compute(repeated=False)
        # Kernels that repeat were not preferred, because the graph has the kernels of a step. So
        # differences may be rounding.
        pairs = list(zip(repeated.digests, eager.digests, strict=True))
        differs = [not torch.equal(*pair) for pair in pairs]
        if any(differs):
            passes = [eager, *(compute(repeated=False) for _ in range(_CALIBRATIONS - 1))]
            apart = torch.stack([_measure_distances(*each) for each in combinations(passes, 2)])
            bounds = _MARGIN * apart.amax(dim=0)
            differs = (_measure_distances(repeated, eager) > bounds).tolist()
        own = describe_difference(repeated.entries, differs)
        labels = gather_json(None if own is None else own.label, self._mesh.control)
        lines = [f"{self._mesh.names[rank]}: {label}" for rank, label in enumerate(labels) if label]
        if not lines:
            return True
        message = (
            f"the replay of iteration {iteration}: the CUDA graph gave other values than the same "
            "pass without it, first in:\n  " + "\n  ".join(lines) + "\nGo back to a checkpoint "
            "before it, continue with --cuda-graph off, and report it"
        )
        if self._excludes is not None:
            raise FaultyHostError(message, [])
        self._log(f"warning: {message}")
        return False

    def finish(self) -> dict[str, int]:
        """See `Replay.finish`."""
        count = self._agreed + self._differed
        if count == 0:
            return {}
        text = format_count(count, "replay", "replays")
        self._log(f"replay: {text} in this launch, {self._differed:,} with a difference")
        return {"replays": count, "replays_with_difference": self._differed}

    def _record_agreement(self, iteration: int) -> None:
        """Count a replay without a difference, and log the first one."""
        if self._agreed == 0:
            ranks = format_count(self._mesh.grid.world_size, "rank", "ranks")
            self._log(
                f"replay: both passes of iteration {iteration} agree on {ranks}. The end of the "
                "launch logs how many did"
            )
        self._agreed += 1
        self._last_good = iteration

    def _compare(self, one: Pass, other: Pass) -> list[RankDifference | None]:
        """Return the differences of two passes on each rank."""
        own = describe_difference(one.entries, self._list_differences(one, other))
        gathered = gather_json(None if own is None else vars(own), self._mesh.control)
        return [None if each is None else RankDifference(**each) for each in gathered]

    def _list_differences(self, one: Pass, other: Pass) -> list[bool]:
        """Return which entries of two passes differ."""
        count = len(one.entries)
        # Numbers that decide what is computed next have differed, so the rest means nothing.
        if one.entries != other.entries:
            pairs = zip(one.entries, other.entries, strict=False)
            return [mine != theirs for mine, theirs in pairs] + [True] * count
        if self._bounds is not None and len(self._bounds) == count:
            return (_measure_distances(one, other) > self._bounds).tolist()
        pairs_of_digests = zip(one.digests, other.digests, strict=True)
        return [not torch.equal(mine, theirs) for mine, theirs in pairs_of_digests]

    def _find_wrong_pass(self, first: Pass, second: Pass, third: Pass) -> int | None:
        """Return which of two passes differs from the two others on this rank, 1 or 2.

        None if this rank cannot decide, because all passes are equal or all differ.
        """
        equal = [not any(self._list_differences(each, third)) for each in (first, second)]
        if equal == [True, False]:
            return 2
        if equal == [False, True]:
            return 1
        return None

    def _is_on_all_ranks(
        self, own: Pass, found: Sequence[RankDifference | None], ranks: Sequence[int]
    ) -> bool:
        """Return whether each rank that computes the first differing entry is among `ranks`."""
        first = [found[rank] for rank in ranks]
        # Ranks of other stages never compute it, and cannot show whether it repeats.
        labels = {difference.label for difference in first if difference is not None}
        computes = any(entry.label in labels for entry in own.entries)
        everyone = gather_json(computes, self._mesh.control)
        return {rank for rank, each in enumerate(everyone) if each} <= set(ranks)

    def _calibrate(self, compute: Callable[[], Pass], label: str) -> bool:
        """Measure how far passes with a kernel that does not repeat differ, and allow it.

        Returns:
            False if all passes are equal. Then all bits must be equal from now on too.
        """
        earlier = self._bounds
        # From here on, recorders measure.
        self._bounds = torch.zeros(0)
        passes = [compute() for _ in range(_CALIBRATIONS)]
        apart = torch.stack(
            [_measure_distances(one, other) for one, other in combinations(passes, 2)]
        ).amax(dim=0)  # [entries]
        # What comes after the first entry that does not repeat depends on it. Few passes may have
        # been equal there by chance, so none gets less than the median.
        after = (apart > 0).cumsum(dim=0) > 0
        typical = float(apart[after].median()) if bool(after.any()) else 0.0
        self._bounds = _MARGIN * apart.clamp(min=typical) * after
        if earlier is not None and len(earlier) == len(apart):
            self._bounds = self._bounds.maximum(earlier)
        # JSON has no infinity, which a single overflow would give.
        largest = min(float(self._bounds.max()), sys.float_info.max)
        own = [int((apart == 0).sum()), len(apart), largest]
        everyone = gather_json(own, self._mesh.control)
        repeating, count, _ = (sum(numbers) for numbers in zip(*everyone, strict=True))
        if repeating == count:
            self._bounds = earlier
            return False
        self._log(
            f"replay: a kernel does not repeat its bits, first in: {label}. Of {count:,} tensors "
            f"of all ranks, {repeating:,} repeat. In the others, a change of one element is found "
            f"if it is larger than {max(numbers[2] for numbers in everyone):.1e} x their norm"
        )
        return True

    def _report(
        self, iteration: int, found: Sequence[tuple[int, RankDifference | None, int | None]]
    ) -> None:
        """Warn, or end the run."""
        lines = []
        for rank, difference, wrong in found:
            which = "" if wrong is None else f", and pass {wrong} was wrong"
            assert difference is not None, "only ranks with a difference are named"
            lines.append(f"{self._mesh.names[rank]}: {difference.label}{which}")
        since = ""
        if self._last_good is not None:
            since = f" The replay of iteration {self._last_good} found no difference."
        message = (
            f"the replay of iteration {iteration}: two passes with the same inputs gave different "
            f"values. {format_count(len(lines), 'rank differs', 'ranks differ')} first:\n  "
            + "\n  ".join(lines)
            + f"\nA device there may be faulty.{since} Exclude its host, and roll back to a "
            "checkpoint before the fault if the loss has suffered"
        )
        if self._excludes is None:
            self._log(f"warning: {message}")
            return
        hosts: list[str] = []
        if self._excludes:
            names = gather_json(platform.node(), self._mesh.control)
            hosts = sorted({names[rank] for rank, *_ in found})
        raise FaultyHostError(message, hosts)


def _measure_distances(one: Pass, other: Pass) -> Tensor:
    """Return by how much the sums and projections of two passes differ, fp64[entries].

    Each distance is relative to the norm, so it does not depend on the loss scale. It is 0 if both
    passes have an overflow, and infinite if one of them has.
    """
    mine, theirs = torch.stack(one.measures), torch.stack(other.measures)
    norm = mine[:, 0].maximum(theirs[:, 0])
    apart = (mine[:, 1:] - theirs[:, 1:]).abs().amax(dim=1)
    finite = [measures.isfinite().all(dim=1) for measures in (mine, theirs)]
    distance = (apart / norm).nan_to_num(nan=0.0)
    distance[finite[0] != finite[1]] = torch.inf
    distance[~finite[0] & ~finite[1]] = 0.0
    return distance


@contextlib.contextmanager
def _prefer_repeatable_kernels(engine: Engine, device: torch.device) -> Iterator[None]:
    """Let torch use kernels that repeat their bits, where it has them.

    On CPUs all of them do. On GPUs the backward passes of attention do not, unless torch is asked
    for it. cuDNN's has no such variant.
    """
    if device.type != "cuda":
        yield
        return
    attentions = [b.attention for s in engine.stages for b in s.get_blocks().values()]
    chosen = [attention.kernels for attention in attentions]
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        for attention, names in zip(attentions, chosen, strict=True):
            attention.kernels = tuple(name for name in names if name != "fused") or names
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        for attention, names in zip(attentions, chosen, strict=True):
            attention.kernels = names
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
