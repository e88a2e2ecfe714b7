"""Tests of the options with which the mesh creates its groups, with torch's fake process group."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.parallel import mesh as mesh_module
from megatron.parallel.grid import Grid
from megatron.parallel.torch_private import make_priority_options

LIMIT = timedelta(minutes=3)


class Options:
    def __init__(self, *, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[int, ...], Any]]]:
    """Yield the members and the options of each group that is created."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    groups = []
    create = dist.new_group

    def note(members: list[int], timeout: timedelta, pg_options: Any) -> Any:
        groups.append((tuple(members), pg_options))
        return create(members, timeout=timeout)

    monkeypatch.setattr(dist, "new_group", note)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("N", (), {"Options": Options}), False)
    yield groups
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("grid", "prioritised"),
    [
        (Grid(pipeline=1, data=2, tensor=2), [(0, 1), (2, 3)]),
        # The world's group has no priority, so all ranks get another one.
        (Grid(pipeline=1, data=1, tensor=4), [(0, 1, 2, 3)]),
        (Grid(pipeline=2, data=2, tensor=1), []),
    ],
)
def test_only_tensor_parallel_groups_of_nccl_have_priority(
    grid: Grid,
    prioritised: list[tuple[int, ...]],
    created: list[tuple[tuple[int, ...], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh_module._make_device_mesh(grid, 0, torch.device("cpu"), LIMIT)
    assert all(options is None for _, options in created)
    created.clear()
    monkeypatch.setattr(mesh_module.dist, "get_backend", lambda group=None: "nccl")
    mesh_module._make_device_mesh(grid, 0, torch.device("cpu"), LIMIT)
    assert [members for members, options in created if options is not None] == prioritised
    for _, options in created:
        assert options is None or (options.is_high_priority_stream and options._timeout == LIMIT)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_knows_the_options() -> None:
    options = make_priority_options(LIMIT)
    assert options.is_high_priority_stream
    assert options._timeout == LIMIT
