"""Runs with --mock-data need no data and learn what the synthetic tokens repeat."""

from training.runs import Runner

MOCK = "--mock-data --vocab-size 64 --lr 1e-2 --eval-iters 1 --eval-interval 20 --save-interval 10"


def test_a_run_learns_and_a_resume_equals_the_uninterrupted_run(run: Runner, other: Runner) -> None:
    output = run(f"{MOCK} --train-iters 40")
    losses = run.losses()
    # A uniform guess among 64 tokens has a loss of 4.16.
    assert losses[1] > 4
    assert losses[40] < 2
    assert "has no effect with --mock-data" in output
    other(f"{MOCK} --train-iters 40 --exit-interval 20")
    other(f"{MOCK} --train-iters 40")
    assert other.losses() == losses


def test_real_data_do_not_continue_a_run_on_synthetic_ones(run: Runner) -> None:
    run("--mock-data --train-iters 10")
    assert "was trained on --mock-data" in run.error("--train-iters 20")


def test_flags_without_effect_are_one_list_at_the_start(run: Runner) -> None:
    flags = "--manual-gc --wandb-exp-name x --ckpt-format torch_dist --use-checkpoint-args"
    lines = run(f"{MOCK} --train-iters 2 {flags}").splitlines()
    start = lines.index("flags without effect:")
    listed = [line.split()[0] for line in lines[start + 1 :] if line.startswith("  --")]
    assert {"--manual-gc", "--wandb-exp-name", "--ckpt-format", "--data-path"} <= set(listed)
    assert not any(line.startswith("warning: --manual-gc") for line in lines)


def test_no_data_set_need_exist(run: Runner) -> None:
    run(f"{MOCK} --train-iters 2 --data-path /nowhere/corpus")
    assert sorted(run.losses()) == [1, 2]
