"""Training over the manifest of a corpus and over the merged data set."""

from pathlib import Path

from data.corpora import write_numbered
from preprocess.corpus_inputs import write_inputs
from preprocess.corpus_runs import make_corpus
from process_pool import ProcessPool
from tiny_corpus import REFERENCE_PREFIX
from training.runs import Runner


def losses(runner: Runner) -> list[tuple[object, ...]]:
    """Return iteration, loss, gradient norm and validation losses of each iteration."""
    names = ("iteration", "lm_loss", "grad_norm", "validation")
    return [
        tuple(each.get(name) for name in names) for each in runner.metrics() if names[1] in each
    ]


def test_a_blend_with_a_manifest_trains_as_one_with_the_merged_data(
    pool: ProcessPool, run: Runner, other: Runner, tmp_path: Path
) -> None:
    """With resumes. The last launch goes on over the merged data."""
    paths = write_inputs(tmp_path / "in")
    flags = ("--input", *map(str, paths), "--engine", "local", "--workers", "1")
    made = make_corpus(tmp_path / "corpus", *flags)
    assert made.code == 0, made.output
    numbered = write_numbered(tmp_path / "numbered", documents=60, size=80)
    evaluated = "--eval-interval 5 --eval-iters 2 --split 80,20,0 --seed 7 --save-interval 1"

    def blend(path: Path | str) -> str:
        # The second --data-path replaces the one of the runner.
        return f"{evaluated} --data-path 0.7 {path} 0.3 {numbered}"

    other(blend(REFERENCE_PREFIX), ranks=2)
    run(f"{blend(made.manifest)} --exit-interval 3", ranks=2)
    output = run(f"{blend(made.manifest)} --exit-interval 6", ranks=2)
    assert "data order" not in output
    output = run(blend(REFERENCE_PREFIX), ranks=2)
    assert "data order" not in output
    assert f"no digest of all bytes of {REFERENCE_PREFIX}" in output
    assert losses(run) == losses(other)
    assert [each[0] for each in losses(run)] == list(range(1, 11))
    assert [each[0] for each in losses(run) if each[3]] == [5, 10]
