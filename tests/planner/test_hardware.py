"""Hardware files, kernels, collectives and goodput."""

import math
import shlex
from dataclasses import replace

import pytest
from planner.published import make_gpt

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.communication import estimate_collective_seconds
from megatron.extras.planner.cost.goodput import (
    CostOptions,
    Reliability,
    choose_save_interval,
    estimate_footprint,
    estimate_goodput,
    estimate_mean_hours_to_failure,
)
from megatron.extras.planner.cost.hardware import find_hardware, list_hardware, load_hardware
from megatron.extras.planner.cost.kernels import (
    Gemm,
    compute_gemm_utilisation,
    estimate_gemm_seconds,
)
from megatron.extras.planner.cost.layers import LayerTimes
from megatron.extras.planner.cost.layout import TRAINER, RankLayout, StepJob
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.cost.tensors import choose_kernel
from megatron.extras.planner.prediction import predict_plan
from megatron.plan.resolve import resolve

A100 = load_hardware("a100-80g")
SMALL = (
    "--preset llama2-7b --bf16 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 "
    "--lr 1e-4 --sharding-strategy fsdp"
)


def test_the_files_of_the_package_can_be_loaded():
    names = {"v100-32g", "a100-40g", "a100-80g", "h100", "h200", "b200", "gh200", "l40s", "a10"}
    names |= {"rtx-3090", "rtx-4090", "h100-pcie"}
    assert names <= set(list_hardware())
    for name in set(list_hardware()) - {"cpu"}:
        hardware = load_hardware(name)
        assert hardware.name == name
        assert hardware.has_gpu
        assert 60 < hardware.peak_tflops < 3000
        assert 15 < hardware.get_peak(half=False) / 1e12 < 100
        # Dense products: no number with sparsity has been copied.
        assert 1.9 < hardware.peak_tflops * 1e12 / hardware.get_peak(half=False) < 31


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("v100-32g", 34.36),
        ("a100-40g", 42.95),
        ("a100-80g", 85.9),
        ("h100", 85.9),
        ("h100-pcie", 85.9),
        ("h200", 151.0),
        ("rtx-3090", 25.77),
        ("rtx-4090", 25.77),
        ("a10", 25.77),
        ("l40s", 51.54),
    ],
)
def test_the_memory_of_a_file_is_a_little_less_than_that_of_the_chips(name, gigabytes):
    """The driver and error correction take up to 9 %. GB and GiB differ by 7 %."""
    assert 0.91 < load_hardware(name).memory_bytes / (gigabytes * 1e9) < 0.995


def test_a_cpu_is_no_gpu():
    cpu = load_hardware("cpu")
    assert not cpu.has_gpu
    assert cpu.get_peak(half=False) < 1e13
    plan = resolve(load_config(shlex.split(SMALL)).config, 8)
    fixed = [rank.fixed / 2**30 for rank in predict_plan(plan, cpu).memory]
    assert fixed == [0.4]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_file_of_a_device(device, name):
    found = find_hardware(device)
    assert (None if found is None else found.name) == name


def test_a_users_file_changes_a_base(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100\nranks_per_node: 4\nnetwork_gb_per_second: 12.5\n")
    mine = load_hardware(str(path))
    assert mine.name == "mine"
    assert mine.ranks_per_node == 4
    assert mine.peak_tflops == load_hardware("h100").peak_tflops


def test_a_count_may_be_written_as_a_float(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100\nranks_per_node: 4.0\n")
    count = load_hardware(str(path)).ranks_per_node
    assert isinstance(count, int)
    assert count == 4


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_hardware(str(path))


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("base: h100\nranks: 4\n", "'ranks' is not a value"),
        ("base: h101\n", "mine:1: the base h101 is not known"),
        ("base: h100\ngemm_share: 1.5\n", "must not exceed 1"),
        ("base: h100\nwatts: true\n", "must be a number"),
        ("base: h100\nwatts: -3\n", "must be from"),
        ("peak_tflops: 100\n", "lacks memory_gib"),
        ("- h100\n", "must be a mapping"),
        ("a: [\n", "is not YAML"),
        ("base: [h100]\n", "is not known"),
        ("base: h100\npeak_tflops: .nan\n", "must be a number"),
        ('base: h100\nname: "a\\x1b"\n', "must be a printable text"),
        ("base: h100\nranks_per_node: 2.5\n", "whole number"),
        ("base: h100\nranks_per_node: 0.5\n", "must be from 1"),
        ("base: h100\nranks_per_node: 1000000000000\n", "must be from 1 to 1e"),
        ("base: h100\npeak_tflops: 1" + 400 * "0" + "\n", "mine:2: peak_tflops is inf"),
        ("base: h100\npeak_tflops: 1" + 5000 * "0" + "\n", "mine:2: peak_tflops is inf"),
        ("base: h100\nlaunch_seconds: 1e300\n", "must be from"),
        ("base: h100\nwatts: 2026-13-45\n", "must be a number"),
        ("base: h100\nwatts: 1:30\n", "must be a number"),
        ("base: h100\nwatts: !!int x\n", "must be a number"),
        ("base: h100\nwatts: 1\nwatts: 2\n", "gives 'watts' again"),
        ("base: h100\nwatts: {a: 1}\n", "must be one value"),
        ("base: h100\n? [a]\n: 3\n", "a key that is not a word"),
        ("base: mine\n", "the base mine is not known"),
        ("a: " + 3000 * "[", "nested too deeply"),
        ("", "the file is empty"),
        ("base: h100\n#" + 2**20 * "x", "more than"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, phrase):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=phrase):
        load_hardware(str(path))


def test_numbers_are_read_as_on_the_command_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: a100\nlaunch_seconds: 4e-6\nranks_per_node: 4.0\nwatts: '700'\n")
    mine = load_hardware(str(path))
    assert (mine.launch_seconds, mine.watts) == (4e-6, 700)
    # The search counts with it.
    assert isinstance(mine.ranks_per_node, int)
    assert mine.memory_gib == A100.memory_gib


def test_a_file_without_a_base_needs_only_what_has_no_default(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("peak_tflops: 100\n")
    with pytest.raises(ConfigError) as error:
        load_hardware(str(path))
    assert "watts" in str(error.value)
    assert "gemm_share" not in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"model.bin: it is not UTF-8 text"):
        load_hardware(str(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="a100-80g, b200"):
        load_hardware("h101")


def test_tiles_and_waves():
    """108 tiles of 256 x 128 fill an A100 once. One more tile needs a second wave."""
    full = Gemm(256 * 9, 128 * 12, 8192)
    more = Gemm(256 * 10, 128 * 12, 8192)
    assert compute_gemm_utilisation(full, 108) > 0.95
    assert compute_gemm_utilisation(more, 108) < 0.85
    # An edge that fills a tile by one row costs a complete tile.
    edge = Gemm(256 * 9 + 1, 128 * 12, 8192)
    assert compute_gemm_utilisation(edge, 108) < compute_gemm_utilisation(full, 108)


def test_head_size_and_alignment():
    scores = [Gemm(2048, 2048, width, 64) for width in (32, 64, 128)]
    speeds = [each.flops / estimate_gemm_seconds(each, A100) for each in scores]
    assert speeds == sorted(speeds)
    aligned = compute_gemm_utilisation(Gemm(4096, 4096, 4096), 108)
    assert compute_gemm_utilisation(Gemm(4096, 4104, 4104), 108) < 0.7 * aligned


def test_a_large_product_is_limited_by_computation_and_a_thin_one_by_memory():
    large = Gemm(16384, 16384, 16384)
    assert large.flops / estimate_gemm_seconds(large, A100) > 0.7 * 312e12
    thin = Gemm(8, 16384, 16384)
    assert estimate_gemm_seconds(thin, A100) == pytest.approx(thin.bytes / A100.memory_rate)
    assert estimate_gemm_seconds(Gemm(8, 8, 8), A100) == A100.launch_seconds


def test_fp32_has_a_peak_of_its_own():
    large = Gemm(16384, 16384, 16384, value=4)
    assert 0.7 * 19.5e12 < large.flops / estimate_gemm_seconds(large, A100) < 19.5e12
    assert large.bytes == 2 * Gemm(16384, 16384, 16384).bytes
    assert large.derive_backward()[0].value == 4
    with pytest.raises(ConfigError, match="a100-80g has no fp32_tflops"):
        estimate_gemm_seconds(large, replace(A100, fp32_tflops=None))


@pytest.mark.parametrize(
    ("more", "half", "windowed", "kernel"),
    [
        ({}, True, False, "flash"),
        ({}, False, False, "efficient"),
        ({"position_embedding_type": "alibi"}, True, False, "efficient"),
        ({}, True, True, "efficient"),
        ({"num_query_groups": 2}, True, False, "flash"),
        ({"num_query_groups": 2}, True, True, "none"),
        ({"num_query_groups": 2}, False, False, "none"),
    ],
)
def test_the_attention_kernel_of_torch(more, half, windowed, kernel):
    shape = make_gpt(1024, 2, 8, 512, 32000, **more)
    assert choose_kernel(shape, replace(TRAINER, half=half), windowed=windowed) == kernel


@pytest.mark.parametrize(("groups", "kernel"), [(8, "efficient"), (2, "none")])
def test_a_v100_has_no_flash_kernel(groups, kernel):
    """Grouped queries then have scores in memory, which take time and space."""
    v100 = load_hardware("v100-32g")
    assert not v100.has_flash
    shape = make_gpt(1024, 2, 8, 512, 32000, num_query_groups=groups)
    assert choose_kernel(shape, replace(TRAINER, flash=False)) == kernel
    with_flash, without = (
        StepPrediction(StepJob(shape, RankLayout(), 8, replace(TRAINER, flash=flash), v100))
        for flash in (True, False)
    )
    slower = without.rank_seconds[0].attention > 1.5 * with_flash.rank_seconds[0].attention
    larger = without.peak_bytes > with_flash.peak_bytes
    assert (slower, larger) == (kernel == "none", kernel == "none")


def test_a_compiled_run_moves_fewer_bytes():
    plan, compiled = (
        resolve(load_config(shlex.split(SMALL + flag)).config, 8)
        for flag in ("", " --use-torch-compile")
    )
    kernels = predict_plan(plan, A100)
    # The kernels of the package leave little to fuse.
    assert predict_plan(compiled, A100).seconds == pytest.approx(kernels.seconds, rel=0.02)
    without = replace(
        plan.config.kernels,
        gradient_accumulation_fusion=False,
        rope_fusion=False,
        bias_swiglu_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    plain, compiled = (
        replace(each, config=replace(each.config, kernels=replace(without, use_torch_compile=on)))
        for each, on in ((plan, False), (compiled, True))
    )
    before, after = (predict_plan(each, A100).rank_seconds[0] for each in (plain, compiled))
    assert after.pointwise < 0.8 * before.pointwise
    assert not predict_plan(plan, load_hardware("v100-32g")).job.software.flash


def test_attention_with_a_bias_computes_the_complete_square():
    """The mask leaves half of it without a bias."""
    seconds = {}
    for kind in ("alibi", "rotary"):
        shape = make_gpt(4096, 2, 32, 8192, 32000, position_embedding_type=kind)
        times = LayerTimes(shape, RankLayout(), TRAINER, A100)
        seconds[kind] = times.estimate_layer().forward.attention
    # Reading the bias takes some time as well.
    assert 2 < seconds["alibi"] / seconds["rotary"] < 3


def test_rings_inside_and_between_nodes():
    size = 1e9
    inside = estimate_collective_seconds(size, 8, A100)
    assert inside == pytest.approx(7 / 8 * size / (300e9 * A100.node_share), rel=0.01)
    assert estimate_collective_seconds(size, 8, A100, passes=2) == 2 * inside
    # Two ranks of different nodes use one network card, and 16 ranks of two nodes use all.
    assert estimate_collective_seconds(size, 2, A100, stride=8) > 5 * inside
    assert estimate_collective_seconds(size, 16, A100) < estimate_collective_seconds(
        size, 2, A100, stride=8
    )
    assert estimate_collective_seconds(size, 1, A100) == 0
    # A small message takes the time of its hops.
    assert estimate_collective_seconds(8, 8, A100) == pytest.approx(7 * A100.hop_seconds, rel=0.01)


def test_the_best_interval_between_saves():
    save, mean = 60.0, 8 * 3600.0
    best = choose_save_interval(save, mean)
    assert best == pytest.approx(math.sqrt(2 * save * mean), rel=0.05)
    reliability = Reliability(8.0, 600.0, save)
    chosen = estimate_goodput(reliability)
    assert chosen.save_interval_seconds == best
    for interval in (best / 2, best * 2):
        assert estimate_goodput(reliability, interval).useful < chosen.useful
    parts = chosen.useful + chosen.saves + chosen.lost_steps + chosen.restarts
    assert parts == pytest.approx(1)


def test_goodput_of_16384_devices_with_published_failures():
    """419 failures in 54 days, and more than 90 % (https://arxiv.org/abs/2407.21783)."""
    nodes = 16384 // 8
    rate = 419 / 54 / nodes * 1000
    hardware = load_hardware("h100")
    assert hardware.ranks_per_node == 8
    hours = estimate_mean_hours_to_failure(16384, 8, rate)
    assert hours == pytest.approx(24 * 54 / 419)
    # 405 billion parameters of 12 bytes, at 2 GB/s of each node.
    save = 405e9 * 12 / (nodes * 2e9)
    assert 0.9 < estimate_goodput(Reliability(hours, 600.0, save)).useful < 0.95


def test_a_run_that_fails_before_it_can_save_has_little_goodput():
    goodput = estimate_goodput(Reliability(0.01, 600.0, 120.0))
    assert 0 < goodput.useful < 0.01


@pytest.mark.parametrize(
    "reliability",
    [
        Reliability(1e-9, 600.0, 60.0),
        Reliability(8.0, 1e300, 60.0),
        Reliability(8.0, 600.0, 1e300),
    ],
)
def test_a_run_without_progress_is_an_error(reliability):
    with pytest.raises(ConfigError, match="makes no progress"):
        estimate_goodput(reliability)


def test_energy_of_bloom():
    """1.08 million device hours and 433 MWh (https://arxiv.org/abs/2211.02001)."""
    options = CostOptions(pue=1.0, carbon_intensity=57)
    footprint = estimate_footprint(load_hardware("jean-zay-a100"), 384, 1_082_990 / 384, options)
    assert footprint.device_hours == pytest.approx(1_082_990)
    assert footprint.megawatt_hours == pytest.approx(433, rel=0.2)
    assert footprint.tonnes == pytest.approx(24.7, rel=0.2)
