"""tools/calibrate.py: constants from a micro-benchmark and from measured steps."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.commands import plan
from megatron.extras.planner.commands import calibrate
from megatron.extras.planner.cost.calibration import Measured, build_measured_hardware
from megatron.extras.planner.cost.hardware import find_hardware, load_hardware
from megatron.extras.planner.device_benchmark import measure_device

ROOT = Path(__file__).resolve().parents[2]
TRAINING = shlex.split(
    "--preset llama2-7b --seq-length 4096 --micro-batch-size 2 --global-batch-size 128 --bf16 "
    "--train-iters 1000 --lr 3e-4 --sharding-strategy fsdp"
)


def test_a_measured_step_is_predicted_after_the_calibration(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    words = [str(path), "--base", "a100-80g", "--seconds", "2.3", "--world-size", "64", "--"]
    assert calibrate.main([*words, *TRAINING]) == 0
    assert "2.3 s measured" in capsys.readouterr().out
    assert load_hardware(str(path)).gemm_share < load_hardware("a100-80g").gemm_share
    words = ["--json", "--hardware", str(path), "--world-size", "64"]
    assert plan.main([*words, *TRAINING]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["hardware"] == "mine"
    assert cost["seconds_per_iteration"] == pytest.approx(2.3, rel=0.001)


def test_the_time_is_the_median_of_a_runs_steps(tmp_path, capsys):
    seconds = [60.0] * 10 + [2.0, 2.1, 2.2, 9.0, 2.1]
    rows = [{"global_batch_size": 128, "seconds": each} for each in seconds]
    rows.append({"global_batch_size": 64, "seconds": 1.0})
    lines = [*map(json.dumps, rows), '{"global_batch_si']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    words = [str(tmp_path / "mine.yaml"), "--base", "a100", "--run", str(tmp_path)]
    assert calibrate.main([*words, "--world-size", "64", "--", *TRAINING]) == 0
    assert "2.1 s measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        b'{"global_batch_size": 128, "seconds": 1' + 400 * b"0" + b"}",
        100_000 * b"[",
        b"\xff\xfe",
        b'{"global_batch_size": 128, "sec',
    ],
)
def test_damaged_lines_of_a_run_are_named(tmp_path, capsys, damage):
    good = json.dumps({"global_batch_size": 128, "seconds": 2.1}).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(15 * good + damage + b"\n" + good)
    words = [str(tmp_path / "mine.yaml"), "--base", "a100", "--run", str(tmp_path)]
    assert calibrate.main([*words, "--world-size", "64", "--", *TRAINING]) == 0
    printed = capsys.readouterr()
    assert "2.1 s measured" in printed.out
    assert "metrics.jsonl:16 is left out" in printed.err


@pytest.mark.parametrize("output", ["", "/dev/null", "/"])
def test_an_output_that_is_no_file_is_refused(capsys, output):
    words = [output, "--base", "a100", "--seconds", "2.3", "--world-size", "64", "--", *TRAINING]
    assert calibrate.main(words) == 2
    assert "is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--seconds", "2.3", "--base", "a100", "--world-size", "0"], "must be at least 1"),
        (["--seconds", "2.3"], "--base is required"),
        (["--seconds", "2.3", "--base", "a100", "--run", "x"], "give one of them"),
        (["--seconds", "0.01", "--base", "a100", "--world-size", "64"], "cannot be explained"),
        (["--seconds", "nan", "--base", "a100", "--world-size", "64"], "above 0 and finite"),
        (["--run", "absent", "--base", "a100", "--world-size", "64"], "metrics.jsonl"),
        (["--seconds", "2.3", "--base", "a100"], "--world-size is required"),
        (["--base", "a100"], "give --run or --seconds"),
        (["--seconds", "2.3", "--base", "a101"], "hardware a101 is neither a known name"),
    ],
)
def test_what_is_wrong_with_a_calibration(tmp_path, capsys, words, phrase):
    path = tmp_path / "mine.yaml"
    assert calibrate.main([str(path), *words, "--", *TRAINING]) == 2
    assert phrase in capsys.readouterr().err
    assert not path.exists()


def test_the_micro_benchmark_measures_this_device():
    measured = measure_device(seconds=0.2)
    assert measured.tflops > 0.001
    assert 0.0001 < measured.memory_tb_per_second < 20
    assert measured.ring_gb_per_second is None
    hardware = build_measured_hardware(measured, None, "here")
    assert hardware.gemm_share == 1
    assert hardware.peak_tflops == measured.tflops


def test_shares_of_a_base():
    base = load_hardware("h100")
    measured = Measured(594.0, 2.68, 79.0, 132, 360.0, 8)
    found = build_measured_hardware(measured, base, "mine")
    assert found.gemm_share == pytest.approx(0.6, abs=0.001)
    assert found.memory_share == pytest.approx(0.8)
    assert found.node_share == pytest.approx(0.8)
    assert found.network_share == base.network_share
    over = build_measured_hardware(replace(measured, ranks=16), base, "mine")
    assert over.network_share == pytest.approx(0.9)
    assert over.node_share == base.node_share
    with pytest.raises(ConfigError, match="another device"):
        build_measured_hardware(measured, load_hardware("a100-80g"), "mine")


@pytest.mark.parametrize(("tflops", "memory", "key"), [(0.07, 2.0, "gemm"), (500, 0.006, "memory")])
def test_a_laptop_is_no_slow_gpu(tflops, memory, key):
    measured = Measured(tflops, memory, 16.0, 2, None, 1)
    with pytest.raises(ConfigError, match=f"{key}_share.*leave --base out"):
        build_measured_hardware(measured, load_hardware("h100"), "mine")


def test_a_file_that_exists_is_changed_only_as_its_own_base(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("base: a100-80g\nnetwork_gb_per_second: 12.5\n")
    before = path.read_text()
    words = ["--seconds", "2.3", "--world-size", "64", "--", *TRAINING]
    assert calibrate.main([str(path), "--base", "a100-80g", *words]) == 2
    assert f"--base {path}" in capsys.readouterr().err
    assert calibrate.main([str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_text() == before
    # Its own values are kept, and the share is fitted.
    assert calibrate.main([str(path), "--base", str(path), *words]) == 0
    found = load_hardware(str(path))
    assert found.network_gb_per_second == 12.5
    assert found.gemm_share < load_hardware("a100-80g").gemm_share


def test_devices_are_found_by_their_names():
    for name, expected in (
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
    ):
        found = find_hardware(name)
        assert found is not None
        assert found.name == expected
    assert find_hardware("NVIDIA A100-PCIE-40GB") is None
    assert find_hardware("cpu") is None


def test_the_cost_model_imports_no_torch():
    code = (
        "import sys; from megatron.extras.planner.cost import calibration, goodput, search; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_file_of_a_measured_device_can_be_loaded(tmp_path, monkeypatch, capsys):
    short = measure_device(seconds=0.05)
    monkeypatch.setattr("megatron.extras.planner.device_benchmark.measure_device", lambda: short)
    path = tmp_path / "here.yaml"
    assert calibrate.main([str(path)]) == 0
    assert "matrix product:" in capsys.readouterr().out
    found = load_hardware(str(path))
    assert found.name == "here"
    assert found.peak_tflops == pytest.approx(short.tflops, rel=0.001)
    assert found.multiprocessors == short.multiprocessors
