"""Steps with --use-torch-compile on the fake GPU: traced, divided and lowered, without kernels."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, run_case
from cuda.formulas import predict
from cuda.test_steps import FORMULAS, OTHERS, check_waits, count_messages

from megatron.extras.planner.dry_run.record import RankReport

GRAPHS = ["backward", "forward", "forward"]
"""A layer, whose graphs all layers share, and the small function that the start compiles to see
whether this machine can."""


def run_compiled(case: Case) -> tuple[RankReport, list[str]]:
    """Run the steps of a case with --use-torch-compile.

    Returns:
        The report of the last step, and for each graph that Inductor has lowered whether it is a
        forward or a backward graph.
    """
    import torch

    from megatron.extras.planner.dry_run import compiler

    lowered: list[str] = []
    lower = compiler._lower

    def lower_and_count(graph: Any, inputs: Any, **options: Any) -> Any:
        # It raises if Inductor cannot lower an operator.
        result = lower(graph, inputs, **options)
        lowered.append("backward" if options.get("is_backward") else "forward")
        return result

    # The graphs of other cases have other sizes, and torch compiles a function only a few times.
    torch.compiler.reset()
    with mock.patch.object(compiler, "_lower", lower_and_count):
        report = run_case(replace(case, flags=f"{case.flags} --use-torch-compile"))
    return report, lowered


# The short suite compiles one of them, because each compilation takes 20 seconds.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("TP", marks=pytest.mark.full),
        pytest.param("TP, recomputed", marks=pytest.mark.full),
        pytest.param("SP, ZeRO 1, fp16", marks=pytest.mark.full),
        "ZeRO 3, TP",
    ],
)
def test_a_compiled_step_sends_the_messages_of_the_formula(name: str, on_fake_gpu: Call):
    case, layout = FORMULAS[name]
    report, lowered = on_fake_gpu(run_compiled, case)
    assert sorted(lowered) == GRAPHS
    assert count_messages(report) == predict(replace(layout, compiled=True))
    check_waits(report)


def test_a_compiled_llama_waits_once_a_step(on_fake_gpu: Call):
    report, lowered = on_fake_gpu(run_compiled, replace(OTHERS["Llama, GQA, ZeRO 3"], steps=2))
    assert sorted(lowered) == GRAPHS
    check_waits(report)
