"""What a launch takes from a checkpoint, and what it leaves."""

import pytest
from runs import Runner


def test_finetune_takes_the_weights_only(run: Runner, other: Runner) -> None:
    run("--exit-interval 6")
    other(f"--finetune --load {run.folder} --lr 1e-3 --train-iters 3")
    entries = other.metrics()
    assert [entry["iteration"] for entry in entries] == [1, 2, 3]
    assert entries[0]["consumed_samples"] == 4
    assert entries[0]["learning_rate"] == pytest.approx(1e-3)  # no schedule to agree with
    assert entries[0]["lm_loss"] < run.losses()[1] - 0.05  # trained weights on the first batch


def test_without_the_optimizer_moments_start_afresh(run: Runner, other: Runner) -> None:
    run("--exit-interval 5")
    other(f"--load {run.folder} --no-load-optim --exit-interval 7")
    run("--exit-interval 7")
    with_moments, without = run.losses(), other.losses()
    assert with_moments[6] == without[6]  # the same weights and data
    assert with_moments[7] != without[7]  # another step


def test_a_checkpoint_without_the_optimizer_says_so(run: Runner, other: Runner) -> None:
    run("--no-save-optim --exit-interval 5")
    error = run.error()
    assert error.startswith("CheckpointError")
    assert "--no-load-optim" in error
    other(f"--load {run.folder} --no-load-optim --exit-interval 7")
    assert sorted(other.losses()) == [6, 7]


def test_another_architecture_is_refused_with_all_differences(run: Runner) -> None:
    run("--exit-interval 2")
    error = run.error(
        "--hidden-size 64 --num-attention-heads 4 --embed-layernorm --normalization RMSNorm"
    )
    for part in (
        "--hidden-size is 32 in it, and 64 here",
        "--num-attention-heads",
        "--embed-layernorm",
        "--normalization",
        "embedding.word",
    ):
        assert part in error
    assert sorted(run.losses()) == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prolonged_run_keeps_its_order(run: Runner, other: Runner, ranks: int) -> None:
    """The order of samples was made for 6 iterations; the run goes on to 10, and sees the same samples up to there."""
    run("--train-iters 6", ranks)
    output = run("--train-iters 10", ranks)
    assert "data order: made for 24 samples, now 40 are asked for" in output
    other("--train-iters 10", ranks)
    assert sorted(run.losses()) == sorted(other.losses())


def test_another_seed_shuffles_only_what_is_not_consumed(run: Runner, other: Runner) -> None:
    run("--exit-interval 5")
    output = run("--seed 99")
    assert "--seed 1234 has become 99; from sample 20 on" in output
    other("")
    assert run.losses()[5] == other.losses()[5]
    assert run.losses()[6] != other.losses()[6]


def test_ramp_up_across_a_resume(run: Runner, other: Runner) -> None:
    """Batch sizes 2, 4, 6, 8: only those still ahead must divide on the new layout."""
    ramp = "--micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 2 2 24"
    other(ramp)
    run(f"{ramp} --exit-interval 6")
    sizes = [entry["global_batch_size"] for entry in run.metrics()]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2
    run(ramp)
    assert run.losses() == other.losses()
