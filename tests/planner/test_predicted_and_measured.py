"""The chronicle compares the predicted time of a step with the measured one."""

import json
from pathlib import Path
from typing import Any

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.chronicle.summary import format_text, list_facts
from megatron.extras.planner.prediction import describe_prediction
from megatron.observe.chronicle import CHRONICLE
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan


def make_plan(*more: str) -> Plan:
    words = (
        "--preset llama2-7b --seq-length 4096 --micro-batch-size 2 --global-batch-size 128 "
        "--train-iters 1000 --lr 3e-4 --sharding-strategy fsdp"
    )
    loaded = load_config([*words.split(), *more])
    plan = resolve(loaded.config, 64, loaded.origin)
    assert plan.errors == ()
    return plan


def write_start(folder: Path, time: str, details: Any) -> None:
    event = {"time": time, "kind": "start", "iteration": 0, "details": details}
    with open(folder / CHRONICLE, "a") as file:
        file.write(json.dumps(event) + "\n")


def write_run(folder: Path, start: Any, seconds: list[float]) -> None:
    before = "2026-01-31T11:59:00+00:00"
    write_start(folder, before, {"seconds": 1.0, "devices": 64, **start})
    rows = [
        {
            "kind": "train",
            "time": f"2026-01-31T12:00:{index:02d}+00:00",
            "iteration": index,
            "global_batch_size": 128,
            "seconds": each,
            "lm_loss": 3.0,
        }
        for index, each in enumerate(seconds, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_start_on_a_known_device_has_a_prediction(tmp_path):
    start = describe_prediction(make_plan("--bf16"), "NVIDIA A100-SXM4-80GB")
    predicted = start["predicted"]
    assert predicted["hardware"] == "a100-80g"
    assert predicted["batch_size"] == 128
    assert 1 < predicted["seconds"] < 4
    assert predicted["verdict"] == "fits"
    assert 36 < predicted["memory_gib"] < 0.9 * 79
    slower = 2 * predicted["seconds"]
    write_run(tmp_path, start, [60.0, slower, slower, slower])
    facts = dict(list_facts(read_history(tmp_path)))
    assert "s on a100-80g predicted" in facts["step"]
    assert f"{slower:.4g} s measured (-50 %)" in facts["step"]
    assert "measured (-50 %)" in format_text(read_history(tmp_path))


def test_no_prediction_for_other_devices():
    assert describe_prediction(make_plan("--bf16"), "cpu") == {}


def test_fp32_is_predicted_by_its_own_peak():
    """An A100 has 19.5 TFLOPs in fp32, and 312 in bf16."""
    fp32, bf16 = (
        describe_prediction(make_plan(*flags), "NVIDIA A100-SXM4-80GB")["predicted"]
        for flags in ((), ("--bf16",))
    )
    assert 5 < fp32["seconds"] / bf16["seconds"] < 312 / 19.5


def test_a_run_without_a_usable_prediction_has_no_such_fact(tmp_path):
    for number, predicted in enumerate(({}, {"predicted": 3}, {"predicted": {"seconds": "1"}})):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_run(folder, predicted, [1.0])
        assert "step" not in dict(list_facts(read_history(folder)))


def test_steps_of_another_batch_size_are_not_compared(tmp_path):
    predicted = {"predicted": {"hardware": "h100", "seconds": 1.0, "batch_size": 256}}
    write_run(tmp_path, predicted, [1.0])
    assert dict(list_facts(read_history(tmp_path)))["step"].endswith("not measured yet")


def test_steps_before_the_last_start_are_not_compared(tmp_path):
    """A run may be resumed on more devices, which have another prediction."""
    predicted = {"hardware": "h100", "seconds": 2.0, "batch_size": 128}
    write_run(tmp_path, {"predicted": predicted}, [4.0, 4.0, 4.0, 2.0])
    assert "4 s measured (-50 %)" in dict(list_facts(read_history(tmp_path)))["step"]
    more = {"predicted": {**predicted, "seconds": 1.0}}
    write_start(tmp_path, "2026-01-31T12:00:03.5+00:00", more)
    assert "2 s measured (-50 %)" in dict(list_facts(read_history(tmp_path)))["step"]
