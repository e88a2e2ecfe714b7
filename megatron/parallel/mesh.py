"""The process groups of torch, built from the grid.

They are in one object, which is passed to the functions that need it. There is no global variable.
A world of one rank has no process groups. Every group is None there, and each collective is
skipped.

Every group exchanges a message at the start, in one order on all ranks, and its result is checked.
NCCL makes a communicator when it is first needed, and both sides wait for each other then. In the
middle of a step, a rank may wait for a message of one group while its peer makes the communicator
of another one. See docs/decisions/041.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron.base.errors import LayoutError
from megatron.base.plain_text import format_some
from megatron.parallel.grid import Grid, GridCoordinate
from megatron.parallel.messages import gather_json
from megatron.parallel.rank_progress import Phase, RankProgress, TimeLimit, wait_for
from megatron.parallel.ranks import Ranks
from megatron.parallel.rendezvous import build_control_group
from megatron.parallel.torch_private import make_priority_options

_SHOWN_RANKS = 8
"""Largest number of ranks that the name of a group lists."""
CommTimer = Callable[[], AbstractContextManager[None]]
"""A function that returns a context manager, which is entered around a collective to time it."""


@dataclass
class ParallelGroup:
    """What a collective must know of its group.

    These are the group's size and this rank's coordinate in it. `comm_timer` is entered around each
    collective.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    comm_timer: CommTimer = nullcontext


@dataclass
class TensorParallel(ParallelGroup):
    """What a tensor-parallel layer must know of its group."""

    sequence_parallel: bool = False
    """Whether the sequence is sharded over the group where activations are else replicated."""


@dataclass
class ContextParallel(ParallelGroup):
    """The ranks that share the sequence of each sample. See `megatron/parallel/context.py`."""

    exchange_heads: bool = False
    """Whether attention exchanges heads for positions (`a2a`). Otherwise it gathers keys."""


@dataclass(frozen=True)
class DataSharding:
    """How data-parallel ranks share the copies of the model, and this rank's coordinate.

    The data axis is (copies, size). The ranks of one copy are neighbours, so they are on one node
    if `size` is the number of data-parallel ranks of a node.
    """

    size: int = 1
    """Ranks that share one copy."""
    copies: int = 1
    rank: int = 0
    """This rank's number among those that share its copy."""
    copy: int = 0
    """The number of this rank's copy."""
    mesh: DeviceMesh | None = None
    """The ranks that share this rank's copy, or None in a world of one."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shards as this one, one of each copy. None if there is only one
    copy."""


@dataclass
class ExpertParallel(ParallelGroup):
    """The ranks that divide the experts of a layer, each of which has complete experts.

    They are neighbours among the ranks of a stage. All ranks of the stage send them tokens, so the
    ranks with the same experts share these as data-parallel ranks share other weights.
    """

    sharding: DataSharding = field(default_factory=DataSharding)
    """How the ranks with the same experts share the copies of them."""
    stage: ParallelGroup = field(default_factory=ParallelGroup)
    """All ranks of this rank's stage."""


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinate in the grid, its device, and its groups."""

    grid: Grid
    rank: int
    coordinate: GridCoordinate
    device: torch.device
    backend: str | None
    """nccl or gloo, or None in a world of one."""
    devices: DeviceMesh | None
    """The mesh with the axes ("pp", "dp", "tp"), or None in a world of one.

    "dp" has data x context ranks, those that compute with the same weights.
    """
    tensor_parallel: TensorParallel
    ends: dist.ProcessGroup | None
    """The first and the last pipeline rank at this rank's data and tensor coordinates.

    They share the embedding if it is tied. None on the ranks between, and without a pipeline.
    """
    control: dist.ProcessGroup | None
    """A gloo group of all ranks for small messages and decisions.

    They do not wait for work that is queued on the GPU.
    """
    names: tuple[str, ...]
    """What `describe()` returns on each rank."""
    time_out: timedelta = timedelta(minutes=10)
    """The time-out of the groups."""
    sharding: DataSharding = field(default_factory=DataSharding)
    """How the data-parallel ranks share the copies of the model."""
    progress: RankProgress = field(default_factory=RankProgress)
    """The phase of this rank, for the watchdog."""
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    expert_parallel: ExpertParallel | None = None
    """The ranks that divide the experts, or None for a model without experts."""

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP2 shards the weights, because several ranks have the same ones."""
        if self.grid.weight_ranks > 1:
            return True
        return self.expert_parallel is not None and self.grid.tensor > 1

    @property
    def ranks(self) -> Ranks:
        """The ranks that read and write files together. All ranks of the grid."""
        return Ranks(self.rank, self.grid.world_size, self.control, self.names, self.progress)

    def build_stage_group(self) -> dist.ProcessGroup | None:
        """Return a new group of the ranks that share one copy of this rank's stages.

        They are ordered by their data coordinate, and then by their tensor coordinate. All ranks of
        the world must call it. The group is None if this rank is its only member.
        """
        size = self.sharding.size * self.grid.tensor
        if size == 1:
            return None
        if size == self.grid.world_size:
            return dist.group.WORLD
        # Tensor is the innermost axis, then context and data, so the members are neighbours.
        members_of_groups = torch.arange(self.grid.world_size).view(-1, size).tolist()
        group = _own_group(members_of_groups, self.rank, self.time_out)
        assert group is not None, "every rank is in the group of its stages"
        device = choose_message_device(group, self.device)
        connect_group(group, "group of a copy of the stages", device, self.progress)
        return group

    def get_pipeline_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that a microbatch passes through, in order."""
        assert self.devices is not None, "a world of one has no mesh"
        return self.devices.get_group("pp")

    def describe(self) -> str:
        """Return this rank's name for messages: `rank 3 on host (pipeline 0, data 1, tensor 1)`."""
        return self.names[self.rank]


def choose_message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device of the tensors that ranks on `device` send to each other in a group.

    gloo cannot send tensors of a GPU, so they are copied to host memory for it.
    """
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return device


def build_mesh(
    grid: Grid,
    device: torch.device,
    *,
    sequence_parallel: bool = False,
    exchange_heads: bool = False,
    shard_size: int | None = None,
    expert_size: int | None = None,
    timeout_minutes: float = 10.0,
    hang_timeout: float | None = None,
    comm_timer: CommTimer = nullcontext,
    control: dist.ProcessGroup | None = None,
    progress: RankProgress | None = None,
) -> Mesh:
    """Divide the running world into the grid's groups, and connect the ranks of each group.

    Args:
        grid: The sizes of the axes.
        device: This rank's device.
        sequence_parallel: Whether activations are sharded along the sequence. It has no effect
            without tensor parallelism.
        exchange_heads: See `ContextParallel`.
        shard_size: Ranks that share one copy of the model. It must divide the number of data x
            context ranks. Default: all of them.
        expert_size: Ranks that divide the experts. It must divide the ranks of a stage. None: the
            model has no experts.
        timeout_minutes: The limit that the time-out of every group is derived from.
        hang_timeout: See `TimeLimit`.
        comm_timer: Entered around each collective, to time it.
        control: The group for messages, if it exists already. See `build_control_group`.
        progress: The phase of this rank, if a watchdog reads it.

    Raises:
        LayoutError: The world has another size than the grid. Or the ranks of a group cannot
            exchange a message.
    """
    progress = progress or RankProgress()
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != grid.world_size:
        raise LayoutError(
            f"{world_size} ranks were started but the layout needs {grid.pipeline} (pipeline) x "
            f"{grid.data} (data) x {grid.context} (context) x {grid.tensor} (tensor) = "
            f"{grid.world_size}; start that many"
        )
    coordinate = grid.get_coordinate(rank)
    name = f"rank {rank} on {os.uname().nodename} ({coordinate})"
    alone = Mesh(
        grid,
        rank,
        coordinate,
        device,
        backend=None,
        devices=None,
        tensor_parallel=TensorParallel(comm_timer=comm_timer),
        ends=None,
        control=None,
        names=(name,),
        progress=progress,
        expert_parallel=None if expert_size is None else ExpertParallel(),
    )
    if world_size == 1:
        return alone
    return _divide_world(
        alone,
        control or build_control_group(timeout_minutes, hang_timeout),
        TimeLimit(timeout_minutes, hang_timeout).collective,
        shard_size or grid.weight_ranks,
        expert_size,
        sequence_parallel=sequence_parallel,
        exchange_heads=exchange_heads,
    )


def _divide_world(
    alone: Mesh,
    control: dist.ProcessGroup | None,
    time_out: timedelta,
    shard_size: int,
    expert_size: int | None,
    *,
    sequence_parallel: bool,
    exchange_heads: bool,
) -> Mesh:
    """Return the mesh of a rank with its groups, which are connected.

    Args:
        alone: The mesh without groups, and with this rank's name only.
        control: The group for messages.
        time_out: The time-out of the groups.
        shard_size: See `build_mesh`.
        expert_size: See `build_mesh`.
        sequence_parallel: See `build_mesh`.
        exchange_heads: See `build_mesh`.

    Raises:
        LayoutError: The ranks of a group cannot exchange a message.
    """
    grid = alone.grid
    comm_timer = alone.tensor_parallel.comm_timer
    # Creating a group is a collective. All ranks must create the same groups in the same order.
    devices = _make_device_mesh(grid, alone.rank, alone.device, time_out)
    sharding = _build_data_sharding(grid, alone.rank, devices, shard_size, time_out)
    ends = _build_ends_group(grid, alone.rank, time_out)
    context_parallel = ContextParallel(
        size=grid.context,
        rank=alone.coordinate.context,
        group=_build_context_group(grid, alone.rank, time_out),
        exchange_heads=exchange_heads,
        comm_timer=comm_timer,
    )
    experts = None
    if expert_size is not None:
        experts = _build_expert_parallel(
            grid, alone.rank, devices.device_type, shard_size, expert_size, time_out
        )
        for ranks in (experts, experts.stage):
            ranks.comm_timer = comm_timer
    pipeline = devices.get_group("pp")
    connect_ranks(
        _name_groups(grid, devices, sharding, ends, context_parallel.group, experts),
        pipeline,
        choose_message_device(pipeline, alone.device),
        alone.progress,
    )
    return replace(
        alone,
        backend=dist.get_backend(),
        devices=devices,
        tensor_parallel=TensorParallel(
            size=grid.tensor,
            rank=alone.coordinate.tensor,
            group=devices.get_group("tp") if grid.tensor > 1 else None,
            sequence_parallel=sequence_parallel and grid.tensor > 1,
            comm_timer=comm_timer,
        ),
        ends=ends,
        control=control,
        names=tuple(gather_json(alone.names[0], control)),
        time_out=time_out,
        sharding=sharding,
        context_parallel=context_parallel,
        expert_parallel=experts,
    )


def _name_groups(
    grid: Grid,
    devices: DeviceMesh,
    sharding: DataSharding,
    ends: dist.ProcessGroup | None,
    context: dist.ProcessGroup | None,
    experts: ExpertParallel | None,
) -> dict[dist.ProcessGroup, str]:
    """Return what each group of a step is, in the order in which the ranks are connected.

    A group of one axis may be the world itself. The name of the axis is more precise.
    """
    world = dist.group.WORLD
    assert world is not None, "the world has several ranks"
    groups = {world: "world"}
    if grid.tensor > 1:
        groups[devices.get_group("tp")] = "tensor-parallel group"
    if context is not None:
        groups[context] = "context-parallel group"
    if grid.weight_ranks > 1:
        assert sharding.mesh is not None, "several ranks have a mesh"
        groups[sharding.mesh.get_group()] = "data-parallel group"
    if sharding.replicas is not None:
        groups[sharding.replicas] = "group of copies"
    if grid.pipeline > 1:
        groups[devices.get_group("pp")] = "pipeline group"
    if ends is not None:
        groups[ends] = "group of the first and the last stage"
    if experts is not None:
        same = experts.sharding
        sharing = None if same.mesh is None or same.size == 1 else same.mesh.get_group()
        for group, name in (
            (experts.group, "expert-parallel group"),
            (experts.stage.group, "group of a stage"),
            (sharing, "group of equal experts"),
            (same.replicas, "group of copies of experts"),
        ):
            if group is not None:
                groups.setdefault(group, name)
    return groups


def _make_device_mesh(
    grid: Grid, rank: int, device: torch.device, time_out: timedelta
) -> DeviceMesh:
    """Return the mesh of the axes ("pp", "dp", "tp").

    `init_device_mesh` would make its groups with the backend's own time-out, so they are made here.
    """
    ranks = torch.arange(grid.world_size).view(grid.pipeline, grid.weight_ranks, grid.tensor)
    groups: list[dist.ProcessGroup] = []
    for axis in range(ranks.dim()):
        # A group's ranks differ only in the coordinate along this axis.
        members_of_groups = ranks.movedim(axis, -1).flatten(0, -2).tolist()
        # Tensor-parallel layers wait for their messages while products of others are queued.
        first = axis == 2 and grid.tensor > 1 and dist.get_backend() == "nccl"
        # A single group contains all ranks, and the world's group has the right time-out already.
        group = dist.group.WORLD
        if len(members_of_groups) > 1 or first:
            group = _own_group(members_of_groups, rank, time_out, first=first)
        assert group is not None, "every rank is in one group of each axis"
        groups.append(group)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("pp", "dp", "tp"))


def _build_data_sharding(
    grid: Grid, rank: int, devices: DeviceMesh, size: int, time_out: timedelta
) -> DataSharding:
    """Return how the data x context ranks share the copies. See `build_mesh`."""
    ranks = grid.weight_ranks
    assert ranks % size == 0, f"groups of {size} cannot divide {ranks} data x context ranks"
    copy, own = divmod(rank // grid.tensor % ranks, size)
    copies = ranks // size
    if copies == 1:
        return DataSharding(size, copies, own, copy, devices["dp"])
    axes = torch.arange(grid.world_size).view(grid.pipeline, copies, size, grid.tensor)
    shards = _own_group(axes.movedim(2, -1).flatten(0, -2).tolist(), rank, time_out)
    replicas = _own_group(axes.movedim(1, -1).flatten(0, -2).tolist(), rank, time_out)
    assert shards is not None, "every rank shares one copy"
    mesh = DeviceMesh.from_group(shards, devices.device_type, mesh_dim_names=("shard",))
    return DataSharding(size, copies, own, copy, mesh, replicas)


def _build_expert_parallel(
    grid: Grid, rank: int, device_type: str, shard_size: int, size: int, time_out: timedelta
) -> ExpertParallel:
    """Return the ranks that divide the experts, and those that have the same ones.

    The ranks of a copy of the model that have the same experts share them, as they share other
    weights. If the experts need the ranks of several copies, each rank keeps its experts whole.
    """
    ranks = grid.weight_ranks * grid.tensor
    assert ranks % size == 0, f"{size} ranks for experts do not divide the {ranks} of a stage"
    own, place = divmod(rank % ranks, size)
    # The plan has refused groups of experts that are no part of a copy, and no multiple of it.
    shards = max(1, shard_size * grid.tensor // size)
    copies = ranks // size // shards
    axes = torch.arange(grid.world_size).view(grid.pipeline, copies, shards, size)

    def build(axis: int) -> dist.ProcessGroup | None:
        return _own_group(axes.movedim(axis, -1).flatten(0, -2).tolist(), rank, time_out)

    sharing = build(2)
    assert sharing is not None, "every rank has experts"
    sharding = DataSharding(
        shards,
        copies,
        own % shards,
        own // shards,
        DeviceMesh.from_group(sharing, device_type, mesh_dim_names=("experts",)),
        build(1) if copies > 1 else None,
    )
    stages = torch.arange(grid.world_size).view(grid.pipeline, ranks).tolist()
    stage = ParallelGroup(ranks, rank % ranks)
    if ranks > 1:
        stage.group = _own_group(stages, rank, time_out)
    group = build(3) if size > 1 else None
    return ExpertParallel(size, place, group, sharding=sharding, stage=stage)


def _build_ends_group(grid: Grid, rank: int, time_out: timedelta) -> dist.ProcessGroup | None:
    """Return the group of the first and the last pipeline rank. See `Mesh.ends`."""
    if grid.pipeline == 1:
        return None
    ends = (0, grid.pipeline - 1)
    # Ranks in the same place of both stages.
    ranks_of_stages = torch.arange(grid.world_size).view(grid.pipeline, -1)
    members_of_groups = [column.tolist() for column in ranks_of_stages[list(ends)].t()]
    return _own_group(members_of_groups, rank, time_out)


def _build_context_group(grid: Grid, rank: int, time_out: timedelta) -> dist.ProcessGroup | None:
    """Return the ranks that share the sequence of this rank's samples, None if it is alone."""
    if grid.context == 1:
        return None
    if grid.context == grid.world_size:
        return dist.group.WORLD
    # Tensor-parallel ranks lie between the members.
    axes = torch.arange(grid.world_size).view(-1, grid.context, grid.tensor)
    return _own_group(axes.movedim(1, -1).flatten(0, -2).tolist(), rank, time_out)


def _own_group(
    members_of_groups: list[list[int]], rank: int, time_out: timedelta, *, first: bool = False
) -> dist.ProcessGroup | None:
    """Return the group that this rank is in, if any.

    Args:
        members_of_groups: The ranks of each group.
        rank: This rank.
        time_out: Time-out of the groups.
        first: Whether its messages have priority on the GPU. Only NCCL has that.
    """
    options = make_priority_options(time_out) if first else None
    own = None
    # `new_group` is a collective over the world. A rank must create every group, also those that it
    # is not in.
    for members in members_of_groups:
        group = dist.new_group(members, timeout=time_out, pg_options=options)
        if rank in members:
            own = group
    return own


def connect_ranks(
    groups: Mapping[dist.ProcessGroup, str],
    pipeline: dist.ProcessGroup,
    device: torch.device,
    progress: RankProgress,
) -> None:
    """Let the ranks of all groups exchange their first messages. All ranks call it together.

    Args:
        groups: This rank's groups, in the same order on all ranks, and what each one is.
        pipeline: The group whose ranks send to their neighbours. It may have one rank.
        device: The device of the messages.
        progress: The phase of this rank. While it waits, the phase names the group.

    Raises:
        LayoutError: The ranks of a group cannot exchange a message. It names the group.
    """
    for group, kind in groups.items():
        connect_group(group, kind, device, progress)
    for pair in _list_neighbours(pipeline.size()):
        if pipeline.rank() in pair:
            _connect_neighbours(pipeline, pair, device, progress)


def connect_group(
    group: dist.ProcessGroup, kind: str, device: torch.device, progress: RankProgress
) -> None:
    """Let the ranks of a group add up their numbers. See `connect_ranks`."""
    ranks = dist.get_process_group_ranks(group)
    with _name_in_errors(kind, ranks, progress):
        total = torch.full((1,), dist.get_rank() + 1, device=device)
        dist.all_reduce(total, group=group)
        _check_message(total, sum(ranks) + len(ranks))


def _list_neighbours(size: int) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks that send to each other, in the order of their messages.

    The last and the first one are neighbours too, because interleaved stages send in a ring. Pairs
    without a common rank connect at the same time.
    """
    order = [*range(0, size, 2), *range(1, size, 2)]
    pairs = [sorted((rank, (rank + 1) % size)) for rank in order]
    # Two ranks are neighbours in both directions, and one rank has none.
    return list(dict.fromkeys((low, high) for low, high in pairs if low < high))


def _connect_neighbours(
    group: dist.ProcessGroup, pair: tuple[int, int], device: torch.device, progress: RankProgress
) -> None:
    """Let two pipeline ranks send to each other in both ways in which torch's schedules send.

    With NCCL, single messages have a communicator of the pair, and batches that of the group.

    Args:
        group: The pipeline group.
        pair: Two ranks of the group, the lower one first.
        device: The device of the messages.
        progress: The phase of this rank.
    """
    own = group.rank()
    peer = sum(pair) - own
    ranks = dist.get_process_group_ranks(group)
    with _name_in_errors("pair of pipeline neighbours", [ranks[each] for each in pair], progress):
        sent = torch.full((1,), ranks[own], device=device)
        received = torch.full_like(sent, -1)
        if own < peer:
            dist.send(sent, group=group, group_dst=peer)
            dist.recv(received, group=group, group_src=peer)
        else:
            dist.recv(received, group=group, group_src=peer)
            dist.send(sent, group=group, group_dst=peer)
        _check_message(received, ranks[peer])
        received = torch.full_like(sent, -1)
        both = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            wait_for(work)
        _check_message(received, ranks[peer])


def _check_message(received: Tensor, expected: int) -> None:
    """Check the number that a first message brought.

    Raises:
        ValueError: It is another one.
    """
    if not torch.equal(received, torch.full_like(received, expected)):
        raise ValueError(f"received {received.item()} instead of {expected}")


@contextmanager
def _name_in_errors(kind: str, ranks: Sequence[int], progress: RankProgress) -> Iterator[None]:
    """Name a group in the phase and in the errors of its first message.

    Raises:
        LayoutError: The message has failed.
    """
    name = f"the {kind} of ranks {format_some(ranks, _SHOWN_RANKS)}"
    with progress.enter(Phase(f"the first message of {name}")):
        try:
            yield
        # torch's errors of communication are RuntimeErrors.
        except (RuntimeError, ValueError) as error:
            # `RollCall` prints only the first line.
            reason = str(error).partition("\n")[0]
            raise LayoutError(
                f"{name} must exchange a message before the first step, but rank "
                f"{dist.get_rank()} failed: {reason}; check the network and the GPUs of their "
                "hosts (NCCL_DEBUG=INFO prints how NCCL connects them), and start again"
            ) from error
