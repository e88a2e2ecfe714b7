"""Parts of a checkpoint that a launch loads, and parts that it replaces."""

import re
import shutil
from pathlib import Path

import pytest
from training.runs import Runner


def test_finetune_loads_only_the_weights(run: Runner, other: Runner) -> None:
    run("--exit-interval 6")
    other(f"--finetune --load {run.folder} --lr 1e-3 --train-iters 3")
    entries = other.metrics()
    assert [entry["iteration"] for entry in entries] == [1, 2, 3]
    assert entries[0]["consumed_samples"] == 4
    assert entries[0]["learning_rate"] == pytest.approx(1e-3)  # no schedule to agree with
    assert entries[0]["lm_loss"] < run.losses()[1] - 0.05  # trained weights on the first batch


@pytest.mark.parametrize("flags", ["--finetune --load {}", "--pretrained-checkpoint {}"])
def test_the_same_command_starts_and_resumes(
    flags: str, run: Runner, other: Runner, tmp_path: Path
) -> None:
    run("--exit-interval 2")
    assert "resumes" not in other(f"{flags.format(run.folder)} --exit-interval 4")
    output = other(f"{flags.format(run.folder)} --exit-interval 6 --no-load-optim")
    assert output.startswith(f"this run resumes at iteration 4 of {other.folder}\n")
    assert sorted(other.losses()) == [1, 2, 3, 4, 5, 6]
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    assert f"not begin from that checkpoint of --load {copy}" in other.error(flags.format(copy))


@pytest.mark.full
def test_a_branch_is_resumed_by_the_same_command(run: Runner, other: Runner) -> None:
    run("--exit-interval 4")
    for last in (6, 8):
        other(f"--load {run.folder} --load-iteration 4 --exit-interval {last}")
    assert sorted(other.losses()) == [5, 6, 7, 8]
    # A command that names another checkpoint of the same folder means another run.
    run("--exit-interval 6")
    assert "not begin from that" in other.error(f"--load {run.folder} --load-iteration 6")


def test_another_schedule_and_another_shape_are_refused_together(run: Runner) -> None:
    run("--exit-interval 2")
    flags = "--lr 1e-3 --hidden-size 64 --vocab-size 6000 --normalization RMSNorm --seq-length 64"
    error = run.error(flags)
    shape = ("--hidden-size is 32 in", "--normalization", "--max-position-embeddings is 32 in")
    for line in ("--lr: 0.001 here", *shape, "5000 ids in"):
        assert line in error


def test_a_finished_run_is_not_validated_again(run: Runner) -> None:
    """Another validation would read other samples, and the run would get another result."""
    flags = "--train-iters 4 --split 8,1,1 --eval-interval 2 --eval-iters 1 --save-interval 4"
    output = run(flags)
    assert output.count("validation loss at iteration 4") == 1
    first = [entry["validation"] for entry in run.metrics() if "validation" in entry]
    again = run(flags)
    assert "the validation of iteration 4 is in the log of an earlier start" in again
    assert "validation loss at iteration 4" not in again
    assert [e["validation"] for e in run.metrics() if "validation" in e] == first
    # A larger number of iterations continues as usual.
    assert "validation loss at iteration 6" in run(f"{flags} --train-iters 6")


def test_a_validation_after_the_last_save_is_repeated_on_the_same_samples(run: Runner) -> None:
    flags = "--train-iters 3 --split 8,1,1 --eval-interval 2 --eval-iters 1 --save-interval 3"
    pattern = re.compile(r"validation loss at iteration 3 .*")
    first = pattern.findall(run(flags))
    assert len(first) == 1
    assert pattern.findall(run(flags)) == first


def test_no_load_optim_starts_with_moments_of_zero(run: Runner, other: Runner) -> None:
    run("--exit-interval 5")
    other(f"--load {run.folder} --no-load-optim --exit-interval 7")
    run("--exit-interval 7")
    with_moments = run.losses()
    without = other.losses()
    assert with_moments[6] == without[6]  # the same weights and data
    assert with_moments[7] != without[7]  # another step


def test_states_that_fit_and_are_not_loaded_are_reported(run: Runner) -> None:
    run("--exit-interval 2")
    output = run("--no-load-optim --exit-interval 4")
    assert "warning: --no-load-optim: the optimizer's states of the checkpoint" in output
    assert "--no-load-optim" not in run("--exit-interval 6")


def test_checkpoint_without_the_optimizer_needs_a_flag(run: Runner, other: Runner) -> None:
    run("--no-save-optim --exit-interval 5")
    error = run.error()
    assert error.startswith("CheckpointError")
    assert "--no-load-optim" in error
    other(f"--load {run.folder} --no-load-optim --exit-interval 7")
    assert sorted(other.losses()) == [6, 7]


def test_different_architecture_is_refused_with_all_differences(run: Runner) -> None:
    run("--exit-interval 2")
    error = run.error(
        "--hidden-size 64 --num-attention-heads 4 --embed-layernorm --normalization RMSNorm"
    )
    for part in (
        "--hidden-size is 32 in the checkpoint, and 64 in this run",
        "--num-attention-heads",
        "--embed-layernorm",
        "--normalization",
        "embedding.word",
    ):
        assert part in error
    lines = error.splitlines()[1:]
    settings = [line.startswith("  --") for line in lines]
    assert settings == sorted(settings, reverse=True), "the settings come first"
    assert settings.count(False) == 4
    assert "more differences of tensors" in lines[-1]
    # Layers that the checkpoint lacks, with weight and moments.
    error = run.error("--num-layers 6")
    assert "--num-layers is" in error
    assert "weight, exp_avg, exp_avg_sq of blocks." in error
    assert len(error.splitlines()) <= 6
    assert sorted(run.losses()) == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_extended_run_keeps_its_order_of_samples(run: Runner, other: Runner, ranks: int) -> None:
    """A run that is extended from 6 to 10 iterations sees the first samples in the same order."""
    run("--train-iters 6", ranks)
    output = run("--train-iters 10", ranks)
    assert "made for 24 samples, now 40 are requested" in output
    other("--train-iters 10", ranks)
    assert sorted(run.losses()) == sorted(other.losses())


def test_changed_seed_shuffles_only_samples_that_are_not_consumed(
    run: Runner, other: Runner
) -> None:
    run("--exit-interval 5")
    output = run("--seed 99")
    assert "--seed changed from 1234 to 99; from sample 20 on" in output
    other("")
    assert run.losses()[5] == other.losses()[5]
    assert run.losses()[6] != other.losses()[6]


def test_batch_size_ramp_up_continues_after_a_resume(run: Runner, other: Runner) -> None:
    """A resume during ramp-up continues with the same batch sizes, which are 2, 4, 6 and 8."""
    ramp = "--micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 2 2 24"
    other(ramp)
    run(f"{ramp} --exit-interval 6")
    sizes = [entry["global_batch_size"] for entry in run.metrics()]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2
    run(ramp)
    assert run.losses() == other.losses()


def find_changes(output: str) -> list[list[str]]:
    """Return the words of each line of the list of changed settings."""
    lines = iter(output.splitlines())
    for line in lines:
        if "changed since the checkpoint of iteration 2" in line:
            break
    found = []
    for line in lines:
        if not line.startswith("  "):
            break
        found.append(line.split())
    return found


def test_changed_settings_are_listed_once_with_both_values(run: Runner) -> None:
    run("--exit-interval 2")
    output = run(
        "--exit-interval 4 --adam-beta2 0.95 --adam-eps 1e-6 --weight-decay 0.2 --clip-grad 0.5 "
        "--hidden-dropout 0.1 --z-loss-coefficient 1e-4 --goldfish-loss --bf16 "
        "--no-weight-decay-on-embeddings --global-batch-size 8 --attention-backend flash unfused "
        "--gradient-accumulation-fusion --fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate",
        ranks=2,
    )
    assert output.count("changed since the checkpoint") == 1
    assert find_changes(output) == [
        ["setting", "before", "now"],
        ["--hidden-dropout", "0.0", "0.1"],
        ["--global-batch-size", "4", "8"],
        ["--weight-decay", "0.01", "0.2"],
        ["--weight-decay-on-embeddings", "on", "off"],
        ["--adam-beta2", "0.999", "0.95"],
        ["--adam-eps", "1e-08", "1e-06"],
        ["--clip-grad", "1.0", "0.5"],
        ["--z-loss-coefficient", "0.0", "0.0001"],
        ["--goldfish-loss", "off", "on"],
        ["--bf16", "off", "on"],
        ["--fp8-format", "not", "set", '"e4m3"'],
        ["--fp8-recipe", "not", "set", '"rowwise"'],
        ["--fp8-emulate", "off", "on"],
        ["--attention-backend", '["by-gpu"]', '["flash",', '"unfused"]'],
        ["--gradient-accumulation-fusion", "auto", "on"],
    ]
    assert output.index("changed since the checkpoint") < output.index("iteration        3/")


def test_settings_that_do_not_change_the_numbers_are_not_listed(run: Runner, other: Runner) -> None:
    run("--exit-interval 2")
    output = run(
        "--exit-interval 3 --tensor-model-parallel-size 2 --async-save --num-workers 1 "
        f"--data-cache-path {other.folder}",
        ranks=2,
    )
    assert "successfully loaded" in output
    assert "changed since the checkpoint" not in output
    # Each launch compares with the last checkpoint and not with the first one.
    run("--exit-interval 4 --clip-grad 0.5")
    assert "changed since the checkpoint" not in run("--exit-interval 5 --clip-grad 0.5")


def test_fine_tuning_lists_no_changes(run: Runner, other: Runner) -> None:
    run("--exit-interval 2")
    output = other(f"--finetune --load {run.folder} --clip-grad 0.5 --train-iters 3")
    assert "changed since the checkpoint" not in output
