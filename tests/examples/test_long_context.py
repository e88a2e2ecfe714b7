"""The file of examples/long_context/ for 64 GPUs: its plan, its verification and a dry run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.dry_run.process import find_compiler
from megatron.extras.planner.prediction import predict_plan
from megatron.extras.planner.verify.reduction import reduce_plan
from megatron.extras.planner.verify.report import describe_layout
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "long_context"
FILE = "examples/long_context/llama3-8b-131072.yaml"
RANKS = 64
TOKENIZER = ["--vocab-size", "128256"]
"""The tokenizer of the file has to be downloaded, and the tests have no network."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    # The file names the phases relative to the root of the repository.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        loaded = load_config(["--config", FILE, *TOKENIZER])
        return resolve(loaded.config, RANKS, loaded.origin)


def test_the_file_has_the_numbers_of_its_comments(plan: Plan) -> None:
    assert plan.errors == ()
    assert [text for text in plan.warnings if "not on this machine" not in text] == []
    assert str(plan.grid) == "pipeline 1 x data 8 x context 8 x tensor 1"
    text = (FOLDER / "llama3-8b-131072.yaml").read_text()
    tokens = plan.batch_size.final * plan.config.model.seq_length
    assert f"# {tokens:,} tokens: {plan.get_num_microbatches(32)} microbatches" in text
    assert f"{plan.train_tokens / 1e9:.1f}B tokens, {plan.train_iters} iterations" in text
    assert [phase.first_iteration for phase in plan.data_phases] == [1, 101]
    assert "more long documents from iteration 101 on" in text


def test_the_page_has_the_predictions_of_the_file(plan: Plan) -> None:
    prediction = predict_plan(plan, load_hardware("h100"))
    assert prediction.verdict is Verdict.FITS
    memory = max(rank.total for rank in prediction.memory) / 2**30
    page = (FOLDER / "README.md").read_text()
    assert f"{memory:.1f} GiB and {prediction.seconds:.1f} s for a step" in page


def test_the_copy_of_the_file_keeps_its_features(plan: Plan, tmp_path: Path) -> None:
    reduction = reduce_plan(plan, tmp_path)
    assert describe_layout(reduction.plan) == "tensor 1 x pipeline 1 x data 2 x context 4"
    assert {"context parallelism", "phases of the data"} <= set(reduction.kept)
    # Eight processes have no room for a third data-parallel rank.
    assert reduction.lost == ("more than two data-parallel ranks",)


def run_tool(tool: str, *flags: str) -> str:
    """Run a tool on the file, and return what it printed."""
    argv = [sys.executable, f"tools/{tool}.py", *flags, "--world-size", str(RANKS)]
    result = subprocess.run(
        [*argv, "--config", FILE, *TOKENIZER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.full
def test_the_layout_of_the_file_equals_one_process() -> None:
    report = json.loads(run_tool("verify", "--json"))
    assert report["verified"]
    assert report["lost"] == ["more than two data-parallel ranks"]


@pytest.mark.full
def test_a_dry_run_needs_the_memory_of_the_page(plan: Plan) -> None:
    if find_compiler() is None:
        pytest.skip("the fake GPU needs a C++ compiler, and there is none")
    reports = json.loads(run_tool("plan", "--dry-run", "--json", "--hardware", "h100"))["dry_run"]
    peak = max(report["peak_bytes"]["total"] for report in reports) / 2**30
    found = re.search(r"needs\s+([\d.]+) GiB", (FOLDER / "README.md").read_text())
    assert found is not None
    assert peak == pytest.approx(float(found[1]), abs=0.01)
