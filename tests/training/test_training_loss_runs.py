"""Flags of the training loss and of weight decay in real runs."""

import pytest
from process_pool import ProcessPool
from training.runs import Runner

VALIDATED = "--train-iters 3 --eval-interval 3 --eval-iters 1 --split 80,20,0"


def losses(run: Runner) -> list[float]:
    return [entry["lm_loss"] for entry in run.metrics() if "lm_loss" in entry]


@pytest.mark.parametrize(
    "flags",
    [
        "--z-loss-coefficient 0.01",
        "--goldfish-loss --goldfish-k 4 --goldfish-h 5",
    ],
)
def test_the_training_loss_changes_and_layouts_agree(
    flags: str, run: Runner, other: Runner
) -> None:
    run(f"{VALIDATED} {flags} --micro-batch-size 2")
    other(
        f"{VALIDATED} {flags} --tensor-model-parallel-size 2 --sequence-parallel "
        "--num-layers 2 --pipeline-model-parallel-size 2",
        ranks=4,
    )
    assert len(losses(run)) == 3
    plain = Runner(run.pool, run.data, run.folder.parent / "plain")
    plain(f"{VALIDATED} --micro-batch-size 2")
    assert losses(run)[0] != pytest.approx(losses(plain)[0], rel=1e-4)
    same = Runner(run.pool, run.data, run.folder.parent / "same")
    same(f"{VALIDATED} {flags} --num-layers 2")
    assert losses(other) == pytest.approx(losses(same), rel=1e-5)


def test_embeddings_may_have_no_weight_decay(
    run: Runner, other: Runner, pool: ProcessPool, corpus: str
) -> None:
    """The word embedding has most of the weights here, so the norm of all shows its decay."""
    flags = "--train-iters 4 --weight-decay 60 --lr 1e-3 --num-layers 2 --log-params-norm"
    run(f"{flags} --no-weight-decay-on-embeddings")
    other(f"{flags} --no-weight-decay-on-embeddings --pipeline-model-parallel-size 2", ranks=2)
    assert losses(other) == pytest.approx(losses(run), rel=1e-5)
    decayed = Runner(pool, corpus, run.folder.parent / "decayed")
    decayed(flags)
    norms = [
        [entry["params_norm"] for entry in runner.metrics() if "params_norm" in entry]
        for runner in (run, decayed)
    ]
    assert norms[0][-1] > 1.03 * norms[1][-1]
