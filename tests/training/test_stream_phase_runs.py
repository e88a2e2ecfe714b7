"""Runs with --dataset-format and --data-phases, as black boxes."""

import json
import shutil
from pathlib import Path

import pytest
from data.row_files import make_documents, write_dataset
from process_pool import ProcessPool
from training.runs import SIZES, Runner

from megatron.commands import plan as plan_tool
from megatron.extras.operations.commands import rollback

FLAGS = (
    "--global-batch-size 12 --micro-batch-size 1 --col-name tokens --eos-token 4999 "
    "--logical-shards 12"
)


class PhaseRunner(Runner):
    """Train in a folder. Batches have 12 samples of 32 tokens, one for each shard."""

    @property
    def phases(self) -> Path:
        return self.folder.parent / "phases.yaml"

    def argv(self, flags: str) -> list[str]:
        return [
            *f"{SIZES} --dataset-format parquet --data-path {self.data} --split 90,10,0".split(),
            *f"{FLAGS} --data-phases {self.phases}".split(),
            *f"--save {self.folder} --load {self.folder}".split(),
            *flags.split(),
        ]

    def state(self, iteration: int) -> dict:
        manifest = self.folder / f"global_step{iteration}" / "manifest.json"
        stream = json.loads(manifest.read_text())["state"]["data"]["train"]["stream"]
        # Data sets that are not read any more come last.
        return {**stream, "datasets": sorted(stream["datasets"], key=lambda each: each["name"])}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for number, (name, count) in enumerate({"web": 600, "code": 200, "math": 200}.items()):
        write_dataset(folder / name, make_documents(count, number), group=70)
    return folder


@pytest.fixture
def run(pool: ProcessPool, data: Path, tmp_path: Path) -> PhaseRunner:
    runner = PhaseRunner(pool, str(data), tmp_path / "run")
    runner.phases.write_text(
        "- datasets: [web, code]\n  weights: [3, 1]\n"
        "- from_iteration: 4\n  datasets: web,math\n  weights: 1,1\n"
        # 6 iterations x 12 samples x 32 tokens are 2304.
        "- from_tokens: 2304\n  datasets: [math, code]\n"
    )
    return runner


@pytest.fixture
def other(pool: ProcessPool, data: Path, tmp_path: Path) -> PhaseRunner:
    return PhaseRunner(pool, str(data), tmp_path / "other")


def test_phases_continue_after_resumes_and_a_rollback(run: PhaseRunner, other: PhaseRunner) -> None:
    output = other("--save-interval 10")
    assert "first iterations 1, 4, 7" in output
    assert "data phase 3 of 3 begins" in output
    expected = other.losses()
    run("--exit-interval 3 --save-interval 1", ranks=3)
    # In the middle of the second phase, and into the third one.
    output = run("--exit-interval 5 --save-interval 1", ranks=2)
    output += run(
        "--exit-interval 7 --save-interval 1 --tensor-model-parallel-size 2 --micro-batch-size 2",
        ranks=4,
    )
    assert "phase 2 of 3" in output
    assert "have changed" not in output
    assert rollback.main([str(run.folder), "--to", "5", "--reason", "spike"]) == 0
    run("--save-interval 10", ranks=3)
    assert run.losses() == pytest.approx(expected, rel=1e-6)
    assert run.state(10) == other.state(10)
    segments = run.state(10)["segments"]
    assert [segment["start_sample"] for segment in segments] == [0, 36, 72]
    assert [[each["name"] for each in segment["datasets"]] for segment in segments] == [
        ["web", "code"],
        ["web", "math"],
        ["math", "code"],
    ]


def test_evaluation_reads_the_first_phase_which_may_be_removed_without_it(
    run: PhaseRunner, other: PhaseRunner, data: Path, tmp_path: Path
) -> None:
    other.data = run.data = str(tmp_path / "copy")
    shutil.copytree(data, run.data)
    flags = "--eval-iters 1 --eval-interval 4"
    output = run(f"{flags} --exit-interval 7")
    assert "validation" in output
    shutil.rmtree(f"{run.data}/web")
    assert "web" in run.error(flags, ranks=2)
    run("")
    assert run.losses_of_training() == list(range(1, 11))


def test_a_change_of_a_phase_that_has_started(run: PhaseRunner) -> None:
    run("--exit-interval 5")
    run.phases.write_text(run.phases.read_text().replace("weights: 1,1", "weights: 1,2"))
    output = run("--save-interval 10")
    assert "The change applies from sample 60 on" in output
    starts = [segment["start_sample"] for segment in run.state(10)["segments"]]
    assert starts == [0, 36, 60, 72]


def test_missing_data_of_a_later_phase(
    run: PhaseRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    run.phases.write_text("- datasets: web\n- from_iteration: 4\n  datasets: none\n")
    assert "none" in run.error("", ranks=2)
    # The phase begins after the end.
    assert "its data are not read" in run("--train-iters 3")
    run.phases.write_text("- datasets: web\n- from_iteration: 4\n  data_path: web\n")
    assert "folders below --data-path" in run.error()
    run.phases.write_text("- datasets: web\n- from_iteration: 4\n  datasets: web,code\n")
    assert plan_tool.main([*run.argv(""), "--world-size", "1"]) == 0
    output = capsys.readouterr().out
    assert "from iteration 4 (sample 36), seed 1234: web,code, weights equal" in output
