"""The probe of a node and the benchmark of a device on the fake GPU."""

import os
from unittest import mock

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import count_collectives

from megatron.extras.operations.slurm.node_report import NodeLimits, NodeReport
from megatron.extras.planner.cost.calibration import Measured
from megatron.extras.planner.dry_run.record import StepTrace


def probe_node(world_size: int, memory_gib: float) -> tuple[NodeReport, StepTrace, list[int]]:
    """Probe the fake GPU, and the all-reduce of a fake world of this size.

    Returns:
        The report, what the probe did, and the bytes in use whenever it gave free memory back.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.extras.operations.slurm import node_probe
    from megatron.extras.planner.dry_run.fake_rank import get_gpu
    from megatron.extras.planner.dry_run.stand_ins import GPU

    gpu = get_gpu()
    gpu.forget_memory()
    limits = NodeLimits(memory_gib=memory_gib)
    findings = node_probe._ProbeFindings(0, lambda report: None)
    # The matrices are drawn on the CPU first, and drawing large ones takes seconds.
    before = node_probe._SIZES
    node_probe._SIZES = {**before, "cuda": (512, before["cuda"][1])}
    used: list[int] = []

    def give_back() -> None:
        used.append(sum(gpu.memory.measure_kept().values()))

    with gpu, mock.patch.object(torch.cuda, "empty_cache", give_back):
        gpu.start_step()
        try:
            node_probe._memory(findings, limits, GPU)
            node_probe._product(findings, limits, GPU)
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
            node_probe._all_reduce(findings, GPU)
        finally:
            node_probe._SIZES = before
            if dist.is_initialized():
                dist.destroy_process_group()
        return findings.report, gpu.end_step(), used


def measure_with_local_rank(local_rank: int, folder: str) -> tuple[NodeReport, Measured]:
    """Probe the node of a task that sees one GPU, and measure the GPU."""
    from megatron.extras.operations.slurm import node_probe
    from megatron.extras.planner import device_benchmark
    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    gpu = get_gpu()
    gpu.forget_memory()
    limits = NodeLimits(memory_gib=1, disk=folder)
    with (
        gpu,
        # The matrices are drawn on the CPU first, and drawing large ones takes seconds.
        mock.patch.dict(node_probe._SIZES, cuda=(512, node_probe._SIZES["cuda"][1])),
        mock.patch.dict(os.environ, LOCAL_RANK=str(local_rank)),
    ):
        report = node_probe.probe(limits, lambda report: None)
        return report, device_benchmark.measure_device(seconds=0.01)


def test_the_probe_of_a_node_uses_no_more_memory_than_it_checks(on_fake_gpu: Call):
    report, step, used = on_fake_gpu(probe_node, 64, 60.0)
    assert report.failures == ()
    assert report.tflops > 0
    assert report.all_reduce_gb_per_second > 0
    # The pattern, and the comparison of one part.
    assert 60 << 30 <= step.peak_bytes < (60 << 30) + (512 << 20)
    # The training gets all of it back.
    assert used == [0]
    sizes = count_collectives(step, "all_reduce", "default_pg") or {
        (each.dtype, each.size): count for each, count in step.collectives.items()
    }
    assert sizes == {("float32", 4 << 26): 2}


@pytest.mark.parametrize("gib", [100.0, 80.0])
def test_the_probe_reports_too_little_memory(gib: float, on_fake_gpu: Call):
    """The fake GPU has 80 GiB, and the comparison needs some MiB besides the pattern."""
    report, _, _ = on_fake_gpu(probe_node, 8, gib)
    assert f"{gib:g} GiB are needed" in report.failures[0]


def test_a_task_that_sees_one_gpu_measures_it(on_fake_gpu: Call, tmp_path):
    report, measured = on_fake_gpu(measure_with_local_rank, 3, str(tmp_path))
    assert report.failures == ()
    assert report.tflops > 0
    assert measured.memory_gib == 80
    assert measured.tflops > 0
