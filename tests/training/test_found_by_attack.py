"""Regression tests for errors of the main job that were found by misuse and fault injection."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.runs import Runner

from megatron.checkpoint.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]


def build_argv_by_samples(run: Runner, flags: str) -> list[str]:
    argv = run.argv(flags)
    at = argv.index("--train-iters")
    return [*argv[:at], *argv[at + 2 :], "--train-samples", "40"]


@pytest.mark.parametrize(("batch", "sizes"), [(8, [4] * 5 + [8, 8]), (2, [4] * 5 + [2] * 10)])
def test_changed_batch_size_on_resume_trains_the_same_samples(
    batch: int, sizes: list[int], run: Runner
) -> None:
    from process_pool import pretrain, succeed

    succeed(run.pool.run(1, pretrain, build_argv_by_samples(run, "--exit-interval 5")))
    succeed(run.pool.run(1, pretrain, build_argv_by_samples(run, f"--global-batch-size {batch}")))
    metrics = run.metrics()
    assert [entry["global_batch_size"] for entry in metrics] == sizes
    assert metrics[-1]["consumed_samples"] == sum(sizes)  # the last, partial batch is dropped


def test_changed_batch_size_with_a_number_of_iterations(run: Runner) -> None:
    run("--exit-interval 5")
    run("--global-batch-size 16")
    assert run.metrics()[-1]["consumed_samples"] == 5 * 4 + 5 * 16


@pytest.mark.parametrize("delay", [0.5, 3.0])
def test_no_rank_outlives_a_killed_torchrun(delay: float, run: Runner) -> None:
    """No rank outlives torchrun when it is killed during the ranks' imports or later.

    The ranks are found by a marker in their environment.
    """
    marker = f"{os.getpid()}-{delay}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "pretrain_gpt.py"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARKER_OF_TEST": marker}
    process = subprocess.Popen(
        [*command, *run.argv("--train-iters 100000")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def alive() -> list[int]:
        return [
            other.pid
            for other in psutil.process_iter(["environ", "cmdline"])
            if (other.info["environ"] or {}).get("MARKER_OF_TEST") == marker
            and any("pretrain_gpt.py" in word for word in other.info["cmdline"] or [])
            and other.pid != process.pid
        ]

    try:
        deadline = time.monotonic() + 60
        while len(alive()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(alive()) == 2
        time.sleep(delay)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive() == []
    finally:
        for pid in alive():
            os.kill(pid, signal.SIGKILL)


def test_folder_that_cannot_be_written_is_found_before_training(run: Runner) -> None:
    for flags, mentions in (
        ("--save /dev/null/x --load /dev/null/x", "--save /dev/null/x cannot be written"),
        ("--tensorboard-dir /dev/null/x", "--tensorboard-dir /dev/null/x cannot be written"),
    ):
        assert mentions in run.error(flags)
        assert not (run.folder / "latest").exists()


def test_evaluating_an_old_checkpoint_does_not_change_the_curve(run: Runner) -> None:
    run("--save-interval 2")
    (run.folder / "latest").write_text("global_step2")
    run("--eval-only --eval-iters 1 --split 80,10,10")
    assert run.losses_of_training() == list(range(1, 11))


def test_loss_of_the_test_set_has_its_own_tag(run: Runner, tmp_path: Path) -> None:
    run(f"--split 80,10,10 --eval-interval 5 --eval-iters 1 --tensorboard-dir {tmp_path}/tb")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("lm-loss-validation/lm loss validation")] == [5, 10]
    assert [e.step for e in events.Scalars("lm-loss-validation/test/lm loss validation")] == [10]


def test_missing_load_flag_does_not_overwrite_a_run(run: Runner, other: Runner) -> None:
    run("--exit-interval 4")
    for flags in ("--load None", f"--finetune --load {other.folder}"):
        error = run.error(flags)
        assert "holds a run (its last checkpoint is global_step4)" in error
        assert "--allow-fresh-start" in error
    assert (run.folder / "latest").read_text() == "global_step4"
    run("--load None --allow-fresh-start --train-iters 2")
    assert (run.folder / "latest").read_text() == "global_step2"


def test_a_misspelt_load_does_not_start_from_scratch(run: Runner, other: Runner) -> None:
    run("--exit-interval 2")
    nowhere = f"{run.folder}x"
    error = other.error(f"--load {nowhere} --exit-interval 1")
    assert f"CheckpointError: --load {nowhere} has no checkpoint" in error
    assert "Correct the path, or leave out --load" in error
    assert not Path(nowhere).exists()
    assert not other.folder.exists() or not any(other.folder.iterdir())
    # A folder that another run has not saved to yet has no checkpoint either.
    (run.folder / "latest").unlink()
    shutil.rmtree(run.folder / "global_step2")
    assert "CheckpointError" in other.error(f"--load {run.folder}")
    other(f"--load {nowhere} --allow-fresh-start --exit-interval 1")
    assert other.losses_of_training() == [1]


def test_run_with_the_largest_seed_can_be_resumed(run: Runner) -> None:
    run("--seed 4294967295 --train-iters 3")
    run("--seed 4294967295 --train-iters 20000 --exit-interval 4")
    assert sorted(run.losses()) == [1, 2, 3, 4]


def test_explicit_default_values_do_not_change_the_architecture(run: Runner) -> None:
    run("--exit-interval 2")
    run("--ffn-hidden-size 128 --num-query-groups 2 --kv-channels 16 --exit-interval 3")
    assert sorted(run.losses()) == [1, 2, 3]


def test_contradicting_data_positions_are_reported_as_damage(run: Runner) -> None:
    run("--exit-interval 2")
    manifest = read_manifest(run.folder / "global_step2")
    manifest.state["consumed_samples"] += 4
    (run.folder / "global_step2" / "manifest.json").write_text(manifest.dump_json())
    error = run.error()
    assert "counts 12 consumed samples" in error
    assert "its data position is 8" in error
