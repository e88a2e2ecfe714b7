"""Runs with --data-phases, as black boxes: resume, rollback, evaluation, ranks and refusals."""

import shutil
from pathlib import Path

import pytest
from process_pool import ProcessPool
from training.runs import SIZES, Runner

from megatron.commands import plan as plan_tool
from megatron.commands import sample_idxs_to_text
from megatron.extras.operations.commands import rollback
from megatron.observe.metrics import read_metrics


class PhaseRunner(Runner):
    """Train in a folder. Batches have 4 samples, so phases of 3 iterations have 12."""

    def __init__(self, pool: ProcessPool, corpus: str, folder: Path) -> None:
        super().__init__(pool, corpus, folder)
        self.phases = folder.parent / "phases.yaml"
        self.write(
            f"- data_path: {corpus}\n"
            f"- from_iteration: 4\n  data_path: [0.3, {corpus}, 0.7, {corpus}]\n  seed: 5\n"
            # 6 iterations x 4 samples x 32 tokens are 768.
            f"- from_tokens: 768\n"
            f"  train_weighted_split_paths: 'late: 1 0.5:0.9 {corpus}'\n"
        )

    def write(self, text: str) -> None:
        self.phases.write_text(text)

    def argv(self, flags: str) -> list[str]:
        folder = str(self.folder)
        return [
            *f"{SIZES} --data-phases {self.phases} --data-cache-path {folder}/cache".split(),
            *f"--save {folder} --load {folder} {flags}".split(),
        ]

    def losses(self) -> dict[int, float]:
        return {e["iteration"]: e["lm_loss"] for e in self.metrics() if "lm_loss" in e}


@pytest.fixture
def run(pool: ProcessPool, corpus: str, tmp_path: Path) -> PhaseRunner:
    return PhaseRunner(pool, corpus, tmp_path / "run")


@pytest.fixture
def other(pool: ProcessPool, corpus: str, tmp_path: Path) -> PhaseRunner:
    return PhaseRunner(pool, corpus, tmp_path / "other")


def test_phases_continue_after_resumes_and_a_rollback(run: PhaseRunner, other: PhaseRunner) -> None:
    output = other("", ranks=2)
    assert "phase 1 of 3" in output
    assert "first iterations 1, 4, 7" in output
    assert "data phase 2 of 3 begins" in output
    assert "data phase 1 of 3 begins" not in output
    expected = other.losses()
    run("--exit-interval 3 --save-interval 1", ranks=2)
    output = run("--exit-interval 7 --save-interval 1")
    assert "phase 2 of 3" in output
    assert "a phase begins" not in output, "nothing has changed"
    # Back into the second phase, then on to the end.
    assert rollback.main([str(run.folder), "--to", "5", "--reason", "spike"]) == 0
    assert "data order" not in run("", ranks=2)
    assert run.losses() == pytest.approx(expected, rel=1e-6)


def test_a_phase_ahead_may_be_changed_and_one_in_the_past_may_not(
    run: PhaseRunner, other: PhaseRunner, corpus: str
) -> None:
    run("--exit-interval 5")
    other("")
    text = run.phases.read_text()
    # The second phase has started, so its past stays. The third one is replaced.
    run.write(text[: text.index("- from_tokens")] + f"- from_iteration: 9\n  data_path: {corpus}\n")
    output = run("")
    assert "data order: a phase begins at sample 32; from there on" in output
    losses = run.losses()
    expected = other.losses()
    assert [losses[at] for at in range(1, 7)] == [expected[at] for at in range(1, 7)]
    assert losses[7] != expected[7]


def test_validation_has_the_documents_that_the_first_phase_leaves_out(
    run: PhaseRunner, other: PhaseRunner, corpus: str
) -> None:
    flags = "--split 90,10,0 --eval-iters 2 --eval-interval 2 --train-iters 4"
    run(flags)
    other.write(f"- data_path: {corpus}\n")
    other(flags)

    def read_first(runner: PhaseRunner) -> float:
        entries = read_metrics(runner.folder / "metrics.jsonl")
        return next(entry["validation"]["validation"] for entry in entries if "validation" in entry)

    # The weights are equal after two iterations, and so are the documents.
    assert read_first(run) == read_first(other)


def test_wrong_phases_are_refused_before_anything_is_written(run: PhaseRunner, corpus: str) -> None:
    run.write(f"- data_path: {corpus}\n- from_iteration: 3\n  data_path: /nowhere/corpus\n")
    assert "/nowhere/corpus" in run.error()
    run.write(f"- data_path: {corpus}\n- from_iteration: 1\n  data_path: {corpus}\n")
    assert "must be above 1" in run.error("", ranks=2)
    assert not run.folder.exists() or not list(run.folder.glob("global_step*"))


def test_the_plan_shows_where_phases_begin(
    run: PhaseRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_tool.main([*run.argv("--train-iters 6"), "--world-size", "1"]) == 0
    output = capsys.readouterr().out
    assert "from iteration 1 (sample 0), seed 1234" in output
    assert "from iteration 4 (sample 12), seed 5" in output
    assert "training ends after iteration 6; its data are not read" in output


def test_larger_batches_on_a_resume_keep_the_phases_in_order(run: PhaseRunner, corpus: str) -> None:
    run.write(
        f"- data_path: {corpus}\n"
        f"- from_iteration: 4\n  data_path: {corpus}\n  seed: 5\n"
        # 5 iterations x 4 samples x 32 tokens are 640. With batches of 16, 2 iterations suffice.
        f"- from_tokens: 640\n  data_path: {corpus}\n"
    )
    run("--exit-interval 7")
    assert "phase 3 of 3" in run("--global-batch-size 16")
    assert list(run.losses()) == list(range(1, 11))


def test_the_text_of_a_run_whose_batches_grew_is_shown(
    run: PhaseRunner, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    for suffix in (".bin", ".idx"):
        shutil.copyfile(corpus + suffix, f"{first}{suffix}")
    run.write(
        f"- train_weighted_split_paths: 'early: 1 0:0.5 {first}'\n"
        f"- from_iteration: 4\n  data_path: {corpus}\n"
    )
    folder = Path(corpus).parent
    tokenizer = (
        f"--vocab-file {folder}/gpt2-tiny-vocab.json --merge-file {folder}/gpt2-tiny-merges.txt"
    )
    run(f"--exit-interval 7 {tokenizer}")
    run(f"--global-batch-size 16 --exit-interval 8 {tokenizer}")
    # The data of a phase that is over may be removed.
    for suffix in (".bin", ".idx"):
        Path(f"{first}{suffix}").unlink()
    capsys.readouterr()
    argv = ["--samples", "20", "50", "--checkpoint", str(run.folder)]
    assert sample_idxs_to_text.main(argv) == 0
    output = capsys.readouterr()
    assert output.out.count("=== sample") == 2
    assert "from sample" not in output.err, "the recorded order is not changed"
    run.phases.unlink()
    assert sample_idxs_to_text.main(argv) == 2
    assert "phases.yaml cannot be read" in capsys.readouterr().err


def test_data_of_a_phase_after_the_end_may_be_missing(run: PhaseRunner, corpus: str) -> None:
    run.write(f"- data_path: {corpus}\n- from_iteration: 4\n  data_path: /nowhere/corpus\n")
    assert "its data are not read" in run("--train-iters 3")
    assert "/nowhere/corpus" in run.error("--train-iters 4 --override-lr-scheduler")
