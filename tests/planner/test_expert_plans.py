"""Plans of models with experts: counts, messages, loads, the search, and published speeds."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from planner.published import (
    DEEPSEEK_OWN,
    Compared,
    compare_expert_rows,
    list_cells,
    read_rows,
)
from planner.test_published import check_table
from shared_data import shared_dir

from megatron.commands import plan as plan_tool
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_search import format_flags, search_plan
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.parameters import count_message_bytes, count_rows
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import describe_layout, predict_plan
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

QWEN = (
    "--preset qwen3-30b-a3b --micro-batch-size 1 --global-batch-size 512 --train-iters 100 "
    "--lr 1e-4 --bf16 --zero-stage 1 --moe-aux-loss-coeff 0.001 "
)
OLMOE = QWEN.replace("qwen3-30b-a3b", "olmoe-1b-7b").replace("512", "16")
"""It is small, so a search is short."""


def make_plan(flags: str, world: int = 64) -> Plan:
    plan = resolve(load_config(shlex.split(QWEN + flags)).config, world, ranks_per_node=8)
    plan.raise_on_errors()
    return plan


def as_json(capsys: pytest.CaptureFixture[str], flags: str, world: int = 64) -> dict[str, Any]:
    words = ["--json", "--world-size", str(world), "--hardware", "h100", *shlex.split(QWEN + flags)]
    assert plan_tool.main(words) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_json_has_the_parameters_that_a_token_uses(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "--expert-model-parallel-size 8")
    assert report["parameters"] == 30_532_122_624
    assert report["active_parameters"] == 3_353_032_704
    assert report["cost"]["breakdown_seconds"]["tokens to experts and back"] > 0
    kinds = report["cost"]["memory_bytes_by_kind"]
    # 16 of 128 experts on 8 ranks each, and the rest on all 64.
    experts = 48 * 16 * 3 * 2048 * 768
    dense = 30_532_122_624 - 8 * experts
    assert kinds["master_weights"] == 4 * (experts // 8 + -(-dense // 64))
    assert report["cost"]["mfu"] == pytest.approx(
        512 * 4096 * report["flops"]["model_per_token"]
        / (64 * 989.4e12 * report["cost"]["seconds_per_iteration"]),
        rel=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "bytes_of_message", "place"),
    [
        (1, 0, "2,048 rows for an expert"),
        (8, 4096 * 8 * 2048 * 2, "of 128 MiB, inside a node"),
        (32, 4096 * 8 * 2048 * 2, "of 128 MiB, 8 of 32 ranks on a node"),
    ],
)
def test_messages_are_named(
    size: int, bytes_of_message: int, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--expert-model-parallel-size {size}"
    layout = describe_layout(make_plan(flags))
    assert count_message_bytes(make_plan(flags).shape, layout, 2) == bytes_of_message
    words = ["--world-size", "64", "--hardware", "h100", *shlex.split(QWEN + flags)]
    plan_tool.main(words)
    text = capsys.readouterr().out
    if size > 1:
        assert place in text
        assert "32.4 % with forced balance (--expert-imbalance)" in text
    # All layers have experts, so no layer has an MLP.
    assert "feed-forward" not in text


def predict(flags: str, imbalance: float = 1.0) -> StepPrediction:
    hardware = replace(load_hardware("h100"), expert_imbalance=imbalance)
    return predict_plan(make_plan(flags), hardware)


def test_an_unbalanced_router_is_slower_and_needs_more_memory() -> None:
    flags = "--expert-model-parallel-size 8"
    steps = [predict(flags, imbalance) for imbalance in (1.0, 1.5, 3.0, 8.0, 100.0)]
    seconds = [step.seconds for step in steps]
    peaks = [step.peak_bytes for step in steps]
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks)
    assert seconds[0] < seconds[1] < seconds[3]
    # One rank cannot get more than all rows.
    assert seconds[3] == seconds[4]
    rows = [count_rows(step.job.shape, step.job.layout)[2] for step in steps]
    assert rows == [32768, 49152, 98304, 262144, 262144]
    # Without a division of the experts, a rank has the rows of its own tokens.
    assert predict("", 3.0).seconds == predict("").seconds


def test_more_rows_for_an_expert_are_multiplied_faster() -> None:
    """The FLOPs of a token are the same, and the products of 64 rows lose time."""
    few, many = (
        predict(f"--seq-length {length} --expert-model-parallel-size 8") for length in (128, 4096)
    )
    gemm = [sum(each.gemm for each in step.rank_seconds) / step.job.tokens for step in (few, many)]
    assert gemm[0] > 1.3 * gemm[1]


def test_a_device_without_a_grouped_kernel_has_a_product_for_each_expert() -> None:
    h100 = load_hardware("h100")
    plan = make_plan("--expert-model-parallel-size 8")
    grouped = predict_plan(plan, h100).rank_seconds[0].gemm
    single = predict_plan(plan, replace(h100, has_grouped_products=False)).rank_seconds[0].gemm
    assert single > grouped


def test_the_search_proposes_ranks_for_experts() -> None:
    config = load_config(shlex.split(OLMOE)).config
    plan = resolve(config, 16, ranks_per_node=8)
    found = search_plan(plan, load_hardware("h100"))
    best = found.result.fastest[0].job.layout
    assert best.expert is not None
    assert best.expert > 1
    flags = format_flags(plan, best)
    assert f"--expert-model-parallel-size {best.expert}" in flags
    # The trainer accepts what is proposed.
    for prediction in found.result.fastest:
        layout = prediction.job.layout
        proposed = load_config(
            [*shlex.split(OLMOE), *shlex.split(format_flags(plan, layout))]
        ).config
        assert not resolve(proposed, 16, ranks_per_node=8).errors
        assert layout.describe() == describe_layout(resolve(proposed, 16)).describe()


@pytest.mark.full
def test_explain_takes_the_ranks_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "16", "--hardware", "h100", "--explain", "ep=16", *shlex.split(OLMOE)]
    plan_tool.main(words)
    out = capsys.readouterr().out
    assert "EP 16" in out.partition("explained:")[2].splitlines()[1]
    assert "tokens to experts and back" in out
    assert plan_tool.main([*words[:5], "ep=3", *shlex.split(OLMOE)]) == 2
    assert "--expert-model-parallel-size 3 must divide" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0.5", "nan", "-1"])
def test_an_impossible_imbalance_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--expert-imbalance", value, "--world-size", "64", *shlex.split(QWEN)]
    assert plan_tool.main(words) == 2
    assert f"--expert-imbalance {float(value)} must be from 1 to" in capsys.readouterr().err


def test_an_imbalance_makes_the_step_longer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "64", "--json", *shlex.split(QWEN)]
    words += ["--expert-model-parallel-size", "8"]
    seconds = []
    for more in ([], ["--expert-imbalance", "2"]):
        assert plan_tool.main([*more, *words]) in (0, 4)
        seconds.append(json.loads(capsys.readouterr().out)["cost"]["seconds_per_iteration"])
    assert seconds[0] < seconds[1]


# ---- Published speeds ----


@pytest.fixture(scope="module")
def published() -> list[Compared]:
    path = shared_dir("data", "published-runs", "long-float8-experts.json")
    return compare_expert_rows(read_rows(path))


def test_the_page_has_the_runs_with_experts(published: list[Compared]) -> None:
    assert len(published) == 5
    check_table("experts", [*list_cells(published), DEEPSEEK_OWN])


def test_errors_of_runs_with_experts(published: list[Compared]) -> None:
    """docs/planner_errors.md names the cause of each. Nothing is fitted on them."""
    errors = {each.key: each.error for each in published}
    assert -0.25 < errors["AutoModel 2025-10, Qwen3 30B-A3B, 8 GPUs, 4,096 tokens"] < 0
    assert -0.15 < errors["AutoModel 2025-10, gpt-oss 20B, 8 GPUs, 4,096 tokens"] < 0
    assert 0 < errors["Megatron-Bridge 26.04.01, gpt-oss 120B, 64 GPUs, 4,096 tokens"] < 0.15
    v3 = "DeepSeek-V3, 256 GPUs, 8,192 tokens"
    assert 0 < errors[f"torchtitan 2026-03, compiled, {v3}"] < 0.23
    assert abs(errors[f"torchtitan 2026-03, deepep, {v3}"]) < 0.02
