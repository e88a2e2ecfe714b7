"""Record digests of what a rank computes in a pass, and find the rank that began to differ.

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

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from megatron.engine.invariants import compute_checksum
from megatron.extras.watch.operator_mode import CollectiveCall, OperatorMode
from megatron.model.gpt import GPT

_SLICE = 1 << 22
"""Elements whose projections are computed at a time."""
MEASURES = 4
"""The measures of a tensor: its norm, its sum and two projections."""


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

    @contextmanager
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


@contextmanager
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

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


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
