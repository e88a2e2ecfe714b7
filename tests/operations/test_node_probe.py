"""The probe of a node on the CPU."""

import os
from pathlib import Path

import pytest

from megatron.extras.operations.slurm.node_probe import probe
from megatron.extras.operations.slurm.node_report import NodeLimits, NodeReport


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeLimits:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return NodeLimits(memory_gib=0.01, disk=str(tmp_path))


def test_good_node_has_no_failures(limits: NodeLimits, tmp_path: Path) -> None:
    seen: list[NodeReport] = []
    report = probe(limits, seen.append)
    assert report.failures == ()
    assert report.tflops is not None
    assert report.disk_mb_per_second is not None
    assert seen[-1] == report
    assert list(tmp_path.iterdir()) == []


def test_disk_is_read_and_not_the_page_cache(
    limits: NodeLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stored something else is found when the pages were dropped from the cache."""

    def drop_pages(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        os.pwrite(descriptor, bytes(16), 1000)

    monkeypatch.setattr(os, "posix_fadvise", drop_pages)
    (failure,) = probe(limits, lambda report: None).failures
    assert "is not what was written" in failure


def test_missing_folder_is_a_failure(limits: NodeLimits, tmp_path: Path) -> None:
    missing = NodeLimits(memory_gib=limits.memory_gib, disk=str(tmp_path / "absent"))
    (failure,) = probe(missing, lambda report: None).failures
    assert "disk: " in failure
    assert "No such file or directory" in failure
