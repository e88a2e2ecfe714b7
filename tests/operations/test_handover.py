"""tools/handover.py: recorded steps are trained again, and what differs is named."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from config.minimal import config_with
from operations.rehearsing import Handover
from operations.run_folder import STARTED, FakeRun, digest_folder, wait_until
from process_pool import ProcessPool
from torch.utils.tensorboard import SummaryWriter

from megatron.base.error_report import FOLDER_VARIABLE
from megatron.base.errors import ConfigError, OperationsError
from megatron.checkpoint.folder import list_saved_iterations
from megatron.commands.handover import Answer, main
from megatron.extras.operations.handover import rehearsal
from megatron.extras.operations.handover.comparison import HandoverComparison
from megatron.extras.operations.handover.record import (
    RecordedSteps,
    TooFewStepsError,
    read_recorded_steps,
)
from megatron.extras.operations.handover.rehearsal import Rehearsal, ScratchFolder, find_program
from megatron.observe.chronicle import CHRONICLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Handover:
    found = Handover(pool, corpus, tmp_path_factory.mktemp("handover") / "run")
    flags = f"--tensorboard-dir {found.folder}-tb --log-batch-size-to-tensorboard"
    log = found.train(f"--pipeline-model-parallel-size 2 {flags}", ranks=4)
    found.folder.with_suffix(".log").write_text(log)
    return found


def test_the_same_command_gives_the_same_bits(recorded: Handover) -> None:
    before = digest_folder(recorded.folder.parent)
    flags = "--pipeline-model-parallel-size 2 --tensorboard-dir tb --log-batch-size-to-tensorboard"
    code, answer, _ = recorded.rehearse("--from 4 --steps 2", flags, ranks=4)
    assert (code, answer["verdict"], answer["changes"]) == (0, "go", {})
    assert {each["bound"] for each in answer["quantities"]} == {0.0}
    assert answer["not_compared"] == []
    assert "tokens of the batch" in {each["name"] for each in answer["quantities"]}
    assert digest_folder(recorded.folder.parent) == before


def test_another_layout_and_a_changed_rate(recorded: Handover) -> None:
    """Without --from, the newest checkpoint with enough recorded steps is used."""
    layout = "--tensor-model-parallel-size 2 --micro-batch-size 2"
    code, answer, _ = recorded.rehearse("--steps 2", layout, ranks=2)
    assert (code, answer["verdict"], answer["from"]) == (0, "go", 8)
    assert answer["changes"]["layout"][1] == "pipeline 1 x data 1 x tensor 2"
    assert answer["changes"]["--micro-batch-size"] == ["1", "2"]
    assert 0 < max(each["difference"] for each in answer["quantities"]) < 1e-5
    rate = f"{layout} --override-lr-scheduler --lr 1.9e-3"
    code, answer, _ = recorded.rehearse("--steps 2", rate, ranks=2)
    assert (code, answer["verdict"]) == (1, "no go: iteration 9, learning rate")
    assert answer["changes"]["--lr"] == ["0.002", "0.0019"]


def test_the_log_of_another_trainer(recorded: Handover) -> None:
    """Only what it logs is compared, to the digits that it has."""
    log = recorded.folder.with_suffix(".log")
    code, answer, _ = recorded.rehearse(f"--from 8 --steps 2 --log {log}")
    assert (code, answer["verdict"]) == (0, "go")
    assert {"loss", "gradient norm"} <= {each["name"] for each in answer["quantities"]}
    assert "tokens of the batch" in answer["not_compared"]
    text = re.sub(r"(iteration +10/.*lm loss: )\S+", r"\g<1>8.0E+00", log.read_text())
    log.write_text(text)
    code, answer, _ = recorded.rehearse(f"--from 8 --steps 2 --log {log}")
    assert (code, answer["verdict"]) == (1, "no go: iteration 10, loss")


def test_a_rehearsal_saves_nothing_and_a_run_keeps_a_checkpoint_for_it(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    run = Handover(pool, corpus, tmp_path / "run")
    intervals = "--save-interval 1 --keep-latest-checkpoints 1"
    log = run.train(f"{intervals} --rehearsal exact --exit-interval 2")
    assert "warning: --rehearsal exact trains without a checkpoint" in log
    assert list_saved_iterations(run.folder) == []
    run.train(f"{intervals} --keep-for-handover 2 --exit-interval 5")
    # The one after it will be old enough for the next checkpoint.
    assert list_saved_iterations(run.folder) == [3, 4, 5]


def test_a_refused_command_is_no_go(recorded: Handover) -> None:
    code, answer, _ = recorded.rehearse("--steps 2", "--norm-epsilon 1e-6")
    assert code == 1
    assert answer["verdict"].startswith("no go: the command ended with exit code 1 before")
    assert "--layernorm-epsilon is 1e-05 in the checkpoint" in answer["verdict"]


def test_the_events_of_another_trainer(recorded: Handover) -> None:
    events = f"--from 8 --steps 2 --log {recorded.folder}-tb"
    code, answer, _ = recorded.rehearse(events)
    assert (code, answer["verdict"]) == (0, "go")
    names = [each["name"] for each in answer["quantities"]]
    logged = {"number of samples", "batch size", "learning rate", "loss", "gradient norm"}
    assert logged <= set(names)
    # What has another step axis is the same number again.
    assert len(names) == 2 * len(set(names))
    assert "tokens of the batch" in answer["not_compared"]
    code, answer, _ = recorded.rehearse(events, "--seed 77")
    assert (code, answer["verdict"]) == (1, "no go: iteration 9, gradient norm")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([], "It printed nothing."),
        (["warning", "killed"], "killed"),
        (["ConfigError: 2 errors:", "- a", "- b", "E1 api.py] ended", "x.ChildFailedError: "],
         "ConfigError: 2 errors: - a"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failed_command(output: list[str], reason: str) -> None:
    record = RecordedSteps(4, 5, config_with(), {5: {}})
    found = HandoverComparison((), (), {})
    verdict = Answer(record, Rehearsal({}, {}, 2, output), found).verdict
    expected = "no go: the command ended with exit code 2 before iteration 5. "
    assert verdict == expected + reason


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path / "run", tmp_path / "aside")
    made.launch(1, 8)
    return made


def test_the_record_of_the_lineage_counts(run: FakeRun) -> None:
    assert read_recorded_steps(run.root, 4, 4).last == 8
    with pytest.raises(TooFewStepsError, match="iteration 9 after global_step8 is not recorded"):
        read_recorded_steps(run.root, 8, 1)
    with pytest.raises(OperationsError, match=r"--from 5: .* are: global_step4, global_step8"):
        read_recorded_steps(run.root, 5, 1)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(line for line in lines if '"iteration": 6,' not in line))
    with pytest.raises(TooFewStepsError, match="iteration 6 after global_step4"):
        read_recorded_steps(run.root, None, 4)
    run.metrics.unlink()
    with pytest.raises(TooFewStepsError, match="iteration 5 after global_step4"):
        read_recorded_steps(run.root, 4, 1)
    with pytest.raises(TooFewStepsError, match="there is no checkpoint; give the --save folder"):
        read_recorded_steps(run.root / "global_step4", None, 1)


def test_a_rollback_and_another_number_of_samples(run: FakeRun) -> None:
    run.launch(5, 12)
    assert read_recorded_steps(run.root, None, 4).iteration == 8
    text = run.metrics.read_text().replace('"consumed_samples": 20,', '"consumed_samples": 24,')
    run.metrics.write_text(text)
    with pytest.raises(OperationsError, match="belongs to another run"):
        read_recorded_steps(run.root, 4, 4)


def test_another_lineage_does_not_count(run: FakeRun, tmp_path: Path) -> None:
    """Iterations repeat after a rollback, and so do names of checkpoints."""
    run.launch(9, 12)
    folder = run.root / "global_step8"
    shutil.copytree(folder, tmp_path / "undone")
    run.back_to(4)
    run.launch(5, 8, scale=2.0)
    found = read_recorded_steps(run.root, None, 4)
    assert (found.iteration, found.steps[5]["lm_loss"]) == (4, 4.0)
    with pytest.raises(TooFewStepsError, match="iteration 9 after global_step8 is not recorded"):
        read_recorded_steps(run.root, 8, 4)
    with pytest.raises(OperationsError, match=r"are: global_step4, global_step8$"):
        read_recorded_steps(run.root, 12, 1)
    run.launch(9, 12)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "undone", folder)
    with pytest.raises(OperationsError, match=r"are: global_step4, global_step12$"):
        read_recorded_steps(run.root, 8, 4)


def test_events_of_megatron(run: FakeRun, tmp_path: Path) -> None:
    """Its tags have no folder. A launch that went back undoes the steps that follow."""
    folder = tmp_path / "events"
    for launch, first, last in ((1, 5, 9), (2, 6, 7)):
        with SummaryWriter(folder, filename_suffix=f".{launch}") as writer:
            writer.add_text("seed", "1234")
            for step in range(first, last + 1):
                for tag, number in (("learning-rate", 1e-3), ("lm loss", launch / step)):
                    writer.add_scalar(tag, number, step)
                    writer.add_scalar(f"{tag} vs samples", number, 4 * step)
                    writer.add_scalar(f"{tag} validation", 9.0, step)
    for number, file in enumerate(sorted(folder.iterdir(), key=lambda path: path.name[-1])):
        file.rename(folder / f"events.out.tfevents.{number}")
    found = read_recorded_steps(run.root, 4, 3, folder).steps
    assert found[5] == {
        "learning_rate": pytest.approx(1e-3),
        "lm_loss": pytest.approx(0.2),
        "consumed_samples": 20,
    }
    assert found[7]["lm_loss"] == pytest.approx(2 / 7)
    with pytest.raises(TooFewStepsError, match="iteration 8 after global_step4 is not recorded"):
        read_recorded_steps(run.root, 4, 4, folder)
    file = folder / "events.out.tfevents.0"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    assert read_recorded_steps(run.root, 4, 4, file).last == 8
    file.write_bytes(bytes(40))
    with pytest.raises(OperationsError, match="has no line or TensorBoard event of Megatron's"):
        read_recorded_steps(run.root, 4, 4, file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="not a regular file"):
        read_recorded_steps(run.root, 4, 4, folder)


def test_the_start_that_trained_the_steps_counts(run: FakeRun) -> None:
    with (run.root / CHRONICLE).open("w") as file:
        for minutes, version in ((0, "first"), (2, "second"), (60, "third")):
            event = {"time": (STARTED + timedelta(minutes=minutes)).isoformat(), "kind": "start"}
            print(json.dumps({**event, "iteration": 0, "details": {"version": version}}), file=file)
    assert read_recorded_steps(run.root, 4, 4).start == {"version": "second"}


def test_steps_that_were_all_skipped_need_more_steps(run: FakeRun) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(line for line in lines if not re.search(r'n": [56],', line)))
    skip = {"kind": "skip", "iteration": 5, "details": {"first": 5, "last": 6}}
    event = json.dumps({"time": STARTED.isoformat(), **skip})
    (run.root / CHRONICLE).write_text(f"{event}\n")
    with pytest.raises(TooFewStepsError, match="from 5 to 6 were skipped; give more --steps"):
        read_recorded_steps(run.root, 4, 2)
    assert [*read_recorded_steps(run.root, 4, 3).steps] == [7]


def test_a_script_is_refused() -> None:
    """It could leave out the flags that keep the rehearsal from the folder of the run."""
    assert find_program(["torchrun", "--nproc-per-node", "2", "a/pretrain_gpt.py", "--lr"]) == 4
    for command in ([], ["bash", "train.sh"]):
        with pytest.raises(ConfigError, match=r"does not name pretrain_gpt\.py"):
            find_program(command)


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "inf"])
def test_a_wrong_time_limit_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none", f"--time-limit={limit}", "--", "pretrain_gpt.py"]) == 2
    assert f"--time-limit {limit} must be above 0" in capsys.readouterr().err


def test_a_launcher_ends_its_workers_at_the_time_limit(tmp_path: Path) -> None:
    """Those of torchrun are in sessions of their own, and hold the output open."""
    launcher = 'setsid sleep 60 & trap "kill $!; exit 1" TERM; wait'
    begin = time.monotonic()
    with ScratchFolder(tmp_path) as scratch:
        assert scratch.run(["sh", "-c", launcher], 0.5) == (None, [])
    assert time.monotonic() - begin < 30
    assert not list(tmp_path.iterdir())


def test_only_the_user_reads_the_folder_and_errors_are_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports would be taken for those of a training in the same job."""
    monkeypatch.setenv(FOLDER_VARIABLE, "reports")
    with ScratchFolder(tmp_path) as scratch:
        assert scratch.path.stat().st_mode & 0o777 == 0o700
        assert scratch.run(["sh", "-c", f'echo "[${FOLDER_VARIABLE}]"'], None) == (0, ["[]"])


def test_the_next_start_removes_what_a_kill_of_all_processes_has_left(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with ScratchFolder(tmp_path) as used:
        *_, space, process, name = used.path.name.split("-")
        assert int(process) == os.getpid()
        left = tmp_path / f"handover-{space}-{ended.pid}-{name}"
        # Another host may have a process with that id.
        elsewhere = tmp_path / f"handover-00000001-{ended.pid}-{name}"
        for folder in (left, elsewhere):
            (folder / "exact").mkdir(parents=True)
        with ScratchFolder(tmp_path):
            assert used.path.exists()
            assert elsewhere.exists()
            assert not left.exists()


@pytest.mark.full
def test_what_ignores_the_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_END_SECONDS", 1)
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; sleep 60; sleep 60"]
    with ScratchFolder(tmp_path) as scratch:
        assert scratch.run(stubborn, 1.0) == (None, ["ready"])
    with ScratchFolder(tmp_path) as scratch:
        process = subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert scratch._remover.stdin is not None
        scratch._remover.stdin.write(f"{process.pid}\n")
    assert process.wait(1.0) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_kill_leaves_nothing(run: FakeRun, tmp_path: Path) -> None:
    """The tool is killed while its command runs. A program in its place starts another process."""
    started = tmp_path / "started"
    program = tmp_path / "pretrain_gpt.py"
    program.write_text(
        f"import os, time\nos.fork()\nopen(f'{started}/{{os.getpid()}}', 'w')\ntime.sleep(60)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started.mkdir()
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1"
    sizes += " --micro-batch-size 1 --train-iters 9 --mock-data --vocab-size 9"
    tool = [sys.executable, ROOT / "tools" / "handover.py", run.root, "--scratch", scratch]
    tool += ["--steps", "2", "--", program]
    before = digest_folder(run.root)
    process = subprocess.Popen(
        [*map(str, tool), *sizes.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(list(started.iterdir())) == 2)
    assert list(scratch.iterdir())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not list(scratch.iterdir()))
    for path in started.iterdir():
        assert not Path("/proc", path.name).exists()
    assert digest_folder(run.root) == before
