"""Test the buffer that an asynchronous save copies to. `tests/cuda/` tests that it is pinned."""

import errno
import mmap
import re
from pathlib import Path

import pytest
import torch

from megatron.base.host_limits import read_available_memory
from megatron.checkpoint import shard_file
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.checkpoint.shard_file import HostBuffer
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.shard import TensorShard


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the bytes of each allocation of a buffer."""
    sizes: list[int] = []
    original = mmap.mmap

    def allocate(number: int, size: int, **options: int) -> mmap.mmap:
        sizes.append(size)
        return original(number, size, **options)

    monkeypatch.setattr(shard_file.mmap, "mmap", allocate)
    return sizes


def make_tensors(*sizes: int) -> dict[str, torch.Tensor]:
    return {str(number): torch.randn(size) for number, size in enumerate(sizes)}


def make_shards() -> list[TensorShard]:
    """Return shards of odd sizes. One is a number, and one is empty."""
    torch.manual_seed(1)
    shapes = [(3, 5), (), (17,), (0, 4), (64, 33), (1, 1, 7)]
    return [
        TensorShard(
            "weight", f"w{number}", shape, (0,) * len(shape), torch.randn(shape), owner=True
        )
        for number, shape in enumerate(shapes)
    ]


def test_each_part_begins_at_a_multiple_of_64_bytes(allocated: list[int]) -> None:
    tensors = make_tensors(1, 25, 0, 16, 65)
    tensors["1"] = tensors["1"].view(5, 5)
    tensors["last"] = torch.ones((), dtype=torch.bfloat16)
    parts = HostBuffer().divide(tensors)
    # 4, 100, 0, 64, 260 and 2 bytes.
    begins = [0, 64, 192, 192, 256, 576]
    base = parts["0"].data_ptr()
    assert [part.data_ptr() - base for part in parts.values() if part.numel()] == [
        begin for begin, part in zip(begins, parts.values(), strict=True) if part.numel()
    ]
    assert base % mmap.PAGESIZE == 0
    assert allocated == [576 + 64]
    for key, part in parts.items():
        assert part.shape == tensors[key].shape
        assert part.dtype == tensors[key].dtype
        part.copy_(tensors[key])
    assert all(torch.equal(part, tensors[key]) for key, part in parts.items())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux has /proc")
def test_a_child_process_does_not_get_the_memory() -> None:
    """A write to a page that a child shares could move it away from under the GPU."""
    part = HostBuffer().divide(make_tensors(1000))["0"]
    address = part.data_ptr()
    # "dc": the mapping is not copied by fork.
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split()


def test_the_memory_is_used_again_until_it_is_too_small(allocated: list[int]) -> None:
    buffer = HostBuffer()
    first = buffer.divide(make_tensors(100, 50))["0"].data_ptr()
    assert buffer.divide(make_tensors(50, 100))["0"].data_ptr() == first
    assert buffer.divide(make_tensors(10))["0"].data_ptr() == first
    assert allocated == [448 + 256]
    parts = buffer.divide(make_tensors(100, 50, 1))
    assert allocated == [448 + 256, 448 + 256 + 64]
    assert [part.numel() for part in parts.values()] == [100, 50, 1]


def test_nothing_is_allocated_for_a_rank_without_shards(allocated: list[int]) -> None:
    assert HostBuffer().divide({}) == {}
    assert allocated == []


def test_an_asynchronous_save_writes_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for asynchronous in (False, True):
        root = tmp_path / str(asynchronous)
        root.mkdir()
        saver = Saver(root, CheckpointConfig(async_save=asynchronous))
        saver.begin(CheckpointContents(1, None, {}, ""), make_shards())
        saver.complete()
        files.append((root / "global_step1" / "rank_00000.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("text", "available"),
    [
        ("MemAvailable: 10 kB\nSwapFree: 2 kB\n", 12 * 1024),
        ("MemTotal: 10 kB\nSwapFree: 2 kB\n", None),
        ("MemAvailable:\nSwapFree: 2 kB\n", None),
        (None, None),
    ],
)
def test_memory_that_the_system_does_not_report(
    text: str | None, available: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("megatron.base.host_limits._MEMINFO", path)
    assert read_available_memory() == available


@pytest.mark.parametrize("overcommitted", [False, True])
def test_too_little_memory_fails_the_save_and_not_the_run(
    overcommitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses memory, or it gives out more than it has and ends the run when it is used."""

    def refuse(number: int, size: int, **options: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 1 kB\nSwapTotal: 9 kB\nSwapFree: 2 kB\n")
    messages: list[str] = []
    root = tmp_path / "checkpoints"
    root.mkdir()
    saver = Saver(root, CheckpointConfig(async_save=True), log=messages.append)
    with monkeypatch.context() as patched:
        if overcommitted:
            patched.setattr("megatron.base.host_limits._MEMINFO", meminfo)
        else:
            patched.setattr(shard_file.mmap, "mmap", refuse)
        saver.begin(CheckpointContents(1, None, {}, ""), make_shards())
        saver.complete()
    assert saver.saved_iteration is None
    assert "not enough memory of the host" in messages[0]
    assert ("the host has 3.07 kB left" in messages[0]) == overcommitted
    saver.begin(CheckpointContents(1, None, {}, ""), make_shards())
    saver.complete()
    assert saver.saved_iteration == 1
