"""Samples, tokens and TFLOPs per second, and the peaks of devices."""

import pytest

from megatron.observe.throughput import Amounts, compute_throughput, find_peak_tflops


def test_rates_equal_those_of_a_published_run() -> None:
    """TFLOPs equal those that the run tr11-176B logged.

    It took 105.22 s an iteration on 384 A100, and logged 149.02 TFLOPs. These are hardware FLOPs
    with full recomputation.
    """
    hidden = 14336
    layers = 70
    seq = 2048
    vocabulary = 250880
    batch = 2048
    flops = (
        96
        * batch
        * seq
        * layers
        * hidden**2
        * (1 + seq / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    done = Amounts(105.22, batch, batch * seq, flops, model_flops=flops * 0.75)
    rates = compute_throughput(done, devices=384, peak_tflops=312.0)
    assert rates.tflops == pytest.approx(149.02, abs=0.01)
    # MFU does not count recomputation.
    assert rates.mfu == pytest.approx(149.02 * 0.75 / 312, abs=1e-4)
    assert rates.samples_per_second == pytest.approx(19.464, abs=1e-3)
    assert rates.tokens_per_second == pytest.approx(39862.5, abs=0.5)
    without_peak = compute_throughput(Amounts(1, 1, 1, 1, 1), devices=1, peak_tflops=None)
    assert without_peak.mfu is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 311.8),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla T4", 65.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_by_device_name(name: str, peak: float | None) -> None:
    assert find_peak_tflops(name) == peak
