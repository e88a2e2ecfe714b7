"""Tests of the start: rank 0 finds and resolves the job, and the other ranks get it as JSON."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from process_pool import PerRank, ProcessPool, pretrain, succeed
from training.runs import SIZES, Runner

from megatron.base.code_version import PACKAGE
from megatron.checkpoint.start import find_start
from megatron.extras.interop.translators.translator import load_config
from megatron.parallel.launcher import LaunchedWorld
from megatron.run.parts import Parts
from megatron.run.start.job import Job, resolve_job, select_checkpoint_config
from megatron.run.start.launch import Launch, check_before_torch, read_launch

ARGV = [*SIZES.split(), "--data-path", "/nowhere/corpus"]
ALONE = LaunchedWorld(1, 0)


def launch(argv: list[str], ranks: int) -> Launch:
    return Launch(load_config(argv), LaunchedWorld(ranks, 0))


def watch_start(argv: list[str]) -> list[str]:
    """Train, and return which steps of the start this rank has made itself."""
    import megatron.run.start.job as job_module

    names = ["find_start", "take_start", "resolve_job", "compare_with_checkpoint"]
    made: list[str] = []

    def record(name):
        original = getattr(job_module, name)

        def call(*args, **kwargs):
            made.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(job_module, name, call)

    patches = [record(name) for name in names]
    for patch in patches:
        patch.start()
    try:
        pretrain(argv)
    finally:
        for patch in patches:
            patch.stop()
    return made


def pretrain_with_lost_search(argv: list[str]) -> None:
    """Train with a search for the checkpoint that fails in a way that no check expects."""
    import megatron.run.start.job as job_module

    error = PermissionError(13, "Permission denied", "/nowhere/kill-switch")
    with mock.patch.object(job_module, "find_start", side_effect=error):
        pretrain(argv)


def pretrain_as_version(argv: list[str], version: str) -> None:
    """Train with this rank's code version replaced."""
    import megatron.run.start.meet as agreement

    with mock.patch.object(agreement, "get_code_version", return_value=version):
        pretrain(argv)


def test_only_rank_0_looks_for_the_checkpoint_and_resolves(run: Runner, pool: ProcessPool) -> None:
    run("--exit-interval 4", ranks=2)
    outcomes = pool.run(2, watch_start, run.argv("--exit-interval 6"))
    assert "loaded checkpoint" in succeed(outcomes)
    assert outcomes[0].value == [
        "find_start",
        "resolve_job",
        "compare_with_checkpoint",
        "take_start",
    ]
    assert outcomes[1].value == []
    assert run.losses_of_training() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 5", "--global-batch-size 5 must be divisible"),
        ("--tensor-model-parallel-size 3", "must divide the number of processes, 2"),
        ("--distributed-timeout-minutes -1", "--distributed-timeout-minutes -1.0 must be above 0"),
        ("--fp16 --bf16", "--bf16"),
        ("--require-load", "so there is nothing to load"),
        ("--load-iteration 3", "has no such checkpoint"),
        ("--eval-only", "contains no checkpoint to evaluate"),
        ("--deepspeed --deepspeed-config /nowhere/ds.json", "/nowhere/ds.json does not exist"),
        ("--kill-switch-path /", "the run does not start"),
    ],
)
def test_a_refusal_is_the_same_on_every_rank(flags: str, message: str, run: Runner) -> None:
    first, second = run.outcomes(flags, ranks=2)
    assert message in str(first.error)
    assert (first.kind, first.error) == (second.kind, second.error)
    assert not run.folder.exists()


def test_a_model_that_is_too_large_for_the_host_is_refused_before_memory_is_used(run: Runner):
    """Linux would end the processes later, without a message."""
    flags = "--num-layers 1000 --hidden-size 65536 --num-attention-heads 512 --zero-stage 1"
    # 12 bytes for each of 5.154 x 10^13 parameters. The launcher of two ranks does not tell whether
    # they share a host, so each of them counts its own half.
    for ranks, needed in ((1, "618 TB"), (2, "309 TB")):
        for outcome in run.outcomes(flags, ranks=ranks):
            assert outcome.kind == "ConfigError", outcome.output
            assert "does not fit into the memory of this host" in str(outcome.error)
            assert f"need {needed}" in str(outcome.error)


def test_a_rank_with_another_layout_is_named(run: Runner, pool: ProcessPool) -> None:
    commands = [run.argv(""), run.argv("--tensor-model-parallel-size 2")]
    for outcome in pool.run(2, pretrain, PerRank(commands)):
        assert outcome.kind == "LayoutError"
        assert "rank 1 on" in str(outcome.error)
        assert "parallel.tensor_model_parallel_size: 1 and 2" in str(outcome.error)


def test_a_rank_of_another_version_is_named(run: Runner, pool: ProcessPool) -> None:
    versions = PerRank(["1.0", "1.0", "1.1"])
    for outcome in pool.run(3, pretrain_as_version, run.argv("--global-batch-size 6"), versions):
        assert outcome.kind == "LayoutError"
        assert "rank 2 on" in str(outcome.error)
        assert "its version is 1.1, and rank 0's is 1.0" in str(outcome.error)


def test_a_rank_with_a_changed_file_is_named(
    run: Runner, pool: ProcessPool, tmp_path: Path
) -> None:
    """Its checkout has the same commit."""
    copies = [tmp_path / name for name in ("zero", "one")]
    package = PACKAGE
    for copy in copies:
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    with open(copies[1] / "model" / "loss.py", "a") as file:
        file.write("\n")
    (copies[1] / "model" / "added.py").touch()
    packages = PerRank([str(copy) for copy in copies])
    for outcome in pool.run(2, pretrain_from_package, run.argv(""), packages):
        assert outcome.kind == "LayoutError"
        assert "rank 1 on" in str(outcome.error)
        names = "these files of its package differ: model/added.py, model/loss.py\n"
        assert names in str(outcome.error)


def pretrain_from_package(argv: list[str], package: str) -> None:
    """Train as if the package were in another folder."""
    from megatron.base.code_version import compute_file_digests

    with mock.patch.object(compute_file_digests, "__defaults__", (Path(package),)):
        pretrain(argv)


def test_a_rank_without_the_deepspeed_json_is_named(
    run: Runner, pool: ProcessPool, tmp_path: Path
) -> None:
    """Each host may have another file of the same name, so the file's name does not decide."""
    files = [tmp_path / "zero" / "ds.json", tmp_path / "one" / "ds.json"]
    files[0].parent.mkdir()
    files[0].write_text('{"comms_logger": {"enabled": true}}')
    outcomes = pool.run(
        2,
        pretrain_with_file,
        run.argv("--deepspeed --deepspeed-config /nowhere/ds.json"),
        PerRank([str(file) for file in files]),
    )
    for outcome in outcomes:
        assert outcome.kind == "LayoutError", outcome.output
        assert "rank 1 on" in str(outcome.error)
        assert "passes nothing (the file does not exist) to DeepSpeed" in str(outcome.error)


def pretrain_with_file(argv: list[str], file: str) -> None:
    """Train with another path of the DeepSpeed JSON in this rank's agreement."""
    from megatron.extras.step.deepspeed.kind import DEEPSPEED
    from megatron.run.pretrain import pretrain

    def describe(config):
        parallel = dataclasses.replace(config.parallel, deepspeed_config=file)
        return DEEPSPEED.describe_settings(dataclasses.replace(config, parallel=parallel))

    engine = dataclasses.replace(DEEPSPEED, describe_settings=describe)
    pretrain(read_launch(load_config(argv), Parts(engine=engine)))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2", 4),
        ("--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8", 4),
        ("--rampup-batch-size 2 2 100 --lr-decay-style cosine --lr-warmup-fraction 0.1", 1),
        ("--skip-train-iteration-range 3-4 6-7", 1),
        ("--step-batch-size-schedule 0:2 64samples:4", 1),
        (
            "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 8 16 "
            "--curriculum-max-steps 4 --train-tokens 1000 --lr-decay-tokens 900",
            2,
        ),
        ("--num-layers 2 --hidden-size 48 --lr 0.1 --min-lr 1e-9 --fp16", 1),
    ],
)
def test_every_rank_builds_the_plan_that_rank_0_resolved(flags: str, world_size: int) -> None:
    job = resolve_job(launch([*ARGV, *flags.split()], world_size), None)
    received = Job.from_json(json.loads(json.dumps(job.to_json())))
    assert received.plan == job.plan
    assert received.state == job.state
    assert received.notes == job.notes


def test_what_a_checkpoint_decides_reaches_every_rank(run: Runner) -> None:
    """The schedule and the ranges that the checkpoint has replace those of the command line."""
    run("--exit-interval 2 --skip-train-iteration-range 5-6")
    flags = "--lr 1e-3 --use-checkpoint-lr-scheduler"
    loaded = load_config(run.argv(flags))
    start = find_start(select_checkpoint_config(loaded.config))
    job = resolve_job(Launch(loaded, ALONE), start.checkpoint)
    assert job.plan.lr_schedule.max_lr == 2e-3
    assert job.plan.skip_ranges == ((5, 6),)
    received = Job.from_json(json.loads(json.dumps(job.to_json())))
    assert received.plan == job.plan
    assert received.state == job.state
    assert received.checkpoint == job.checkpoint


def test_rank_that_is_lost_during_the_start_is_named(run: Runner, pool: ProcessPool) -> None:
    """Rank 0 fails alone while the other rank waits for the job."""
    outcomes = pool.run(2, pretrain_with_lost_search, run.argv("--distributed-timeout-minutes 0.2"))
    assert outcomes[0].kind == "PermissionError"
    assert outcomes[1].kind == "LostRanksError"
    assert "the ranks cannot continue together" in str(outcomes[1].error)
    assert "rank 0 on " in str(outcomes[1].error)


def test_folder_that_cannot_be_looked_for_is_left_to_rank_0() -> None:
    # A name of 300 characters is an error of the file system, as a folder without permission is.
    check_before_torch(launch([*ARGV, "--load", f"/nowhere/{'x' * 300}"], 2))
