"""Tasks of lm-evaluation-harness inside the training loop."""

import json
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from process_pool import Outcome, ProcessPool, pretrain, succeed
from scoring.local_tasks import write_task_with_examples, write_tasks
from tiny_corpus import MERGES, VOCAB
from training.runs import Runner

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.config.data import TokenizerConfig
from megatron.extras.inference.commands import evaluate
from megatron.extras.inference.generate.load import load_model
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.inference.scoring.likelihood import Scorer
from megatron.extras.inference.scoring.tasks import find_tasks
from megatron.observe.metrics import read_metrics
from megatron.tokenizer.build import build_tokenizer

pytest.importorskip("lm_eval")

# With dropout, training depends on random numbers that the tasks could disturb.
FLAGS = (
    "--num-layers 4 --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1 "
    f"--attention-dropout 0.1 --lr 1e-2 --train-iters 4 --save-interval 2 --init-method-std 0.2 "
    f"--vocab-file {VOCAB} --merge-file {MERGES} --vocab-size None"
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks. The number of their requests is odd."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, documents=5)
    write_task_with_examples(folder)
    return folder


def flags_of(tasks: Path, interval: int = 2) -> str:
    names = "choose_locally read_locally repeat_locally"
    return (
        f"--eval-tasks {names} --eval-tasks-interval {interval} --eval-tasks-folder {tasks} "
        "--eval-tasks-num-fewshot 2"
    )


def pretrain_offline(argv: list[str], cache: str) -> list[tuple[Any, Any]]:
    """Run a command line. Return the requests and likelihoods of each evaluation."""
    os.environ["HF_HOME"] = cache
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    from megatron.extras.inference.scoring.eval_tasks import EvalTasks

    seen: list[tuple[Any, Any]] = []
    compute = EvalTasks.compute_scores

    def record(self: EvalTasks, likelihoods: Any, log: Any) -> Any:
        seen.append((list(unpack(self.requests)), likelihoods.tolist()))
        return compute(self, likelihoods, log)

    EvalTasks.compute_scores = record  # type: ignore[method-assign]
    try:
        pretrain(argv)
    finally:
        EvalTasks.compute_scores = compute  # type: ignore[method-assign]
    return seen


def stop_in_tasks(argv: list[str], cache: str) -> None:
    """Run a command line until a signal comes while the first batch of the tasks is scored."""
    from megatron.extras.inference.scoring.likelihood import EngineScorer

    make = EngineScorer._make_microbatches

    def make_and_signal(self: EngineScorer, *arguments: Any) -> Any:
        self._mesh.progress.stop_signal = signal.SIGTERM
        return make(self, *arguments)

    with mock.patch.object(EngineScorer, "_make_microbatches", make_and_signal):
        pretrain_offline(argv, cache)


def unpack(requests: Any) -> Iterator[tuple[list[int], list[int]]]:
    ids = requests.tokens.tolist()
    for length, following in requests.lengths.tolist():
        yield ids[: length - following], ids[length - following : length]
        ids = ids[length:]


class TaskRunner(Runner):
    """A `Runner` whose runs have tasks."""

    def launch(self, flags: str, ranks: int = 1) -> list[Outcome]:
        argv = self.argv(f"{FLAGS} {flags}")
        return self.pool.run(ranks, pretrain_offline, argv, str(self.folder.parent / "hf"))

    def scores(self) -> dict[int, Any]:
        return {entry["iteration"]: entry["tasks"] for entry in self.metrics() if "tasks" in entry}

    def numbers(self) -> list[tuple[float, float]]:
        return [(entry["lm_loss"], entry["grad_norm"]) for entry in self.metrics()]


def make_runner(pool: ProcessPool, corpus: str, folder: Path) -> TaskRunner:
    return TaskRunner(pool, corpus, folder)


@pytest.fixture(scope="module")
def evaluated(
    pool: ProcessPool, corpus: str, tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TaskRunner, list[Outcome]]:
    """Return a run of four iterations with an evaluation after the second and the fourth."""
    runner = make_runner(pool, corpus, tmp_path_factory.mktemp("evaluated") / "run")
    board = runner.folder / "board"
    outcomes = runner.launch(f"{flags_of(tasks)} --tensorboard-dir {board}")
    succeed(outcomes)
    return runner, outcomes


def compare_items(folder: Path, iteration: int, seen: tuple[Any, Any]) -> None:
    """Compare each item with the model of the checkpoint that was saved at the same iteration."""
    requests, likelihoods = seen
    expected = Scorer(StagedModel(load_model(open_checkpoint(folder, iteration))), 4).score(
        requests
    )
    assert len(likelihoods) == len(expected) > 20
    for (log_likelihood, greedy), item in zip(likelihoods, expected, strict=True):
        assert log_likelihood == pytest.approx(item.log_likelihood, rel=1e-5, abs=1e-5)
        assert bool(greedy) == item.greedy


def test_interrupted_tasks_are_repeated_by_the_next_start(
    pool: ProcessPool,
    corpus: str,
    tasks: Path,
    evaluated: tuple[TaskRunner, list[Outcome]],
    tmp_path: Path,
) -> None:
    runner = make_runner(pool, corpus, tmp_path / "run")
    argv = runner.argv(f"{FLAGS} {flags_of(tasks)}")
    output = succeed(pool.run(1, stop_in_tasks, argv, str(tmp_path / "hf")))
    assert "a signal interrupts the tasks" in output
    assert runner.scores() == {}
    succeed(runner.launch(flags_of(tasks)))
    assert runner.scores() == evaluated[0].scores()
    assert runner.numbers() == evaluated[0].numbers()


def test_scores_equal_those_of_the_saved_checkpoints(
    evaluated: tuple[TaskRunner, list[Outcome]],
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    runner, outcomes = evaluated
    scores = runner.scores()
    assert list(scores) == [2, 4]
    assert scores[2] != scores[4]
    for iteration, seen in zip(scores, outcomes[0].value, strict=True):
        compare_items(runner.folder, iteration, seen)
        out = tmp_path / f"{iteration}.json"
        names = ["choose_locally", "read_locally", "repeat_locally"]
        command = ["--load", str(runner.folder), "--iteration", str(iteration), "--tasks", *names]
        command += ["--task-folder", str(tasks), "--num-fewshot", "2", "--out", str(out)]
        assert evaluate.main(command) == 0
        found = json.loads(out.read_text())["tasks"]
        assert list(scores[iteration]) == names
        for name, metrics in scores[iteration].items():
            assert metrics
            for metric, value in metrics.items():
                assert value == pytest.approx(found[name][metric], rel=1e-5), (name, metric)


def test_scores_are_logged(evaluated: tuple[TaskRunner, list[Outcome]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runner, outcomes = evaluated
    (line,) = [
        line
        for line in outcomes[0].output.splitlines()
        if line.startswith(" task choose_locally at iteration 4 |")
    ]
    scores = runner.scores()[4]["choose_locally"]
    assert f"acc: {scores['acc']:.6g} |" in line
    events = EventAccumulator(str(runner.folder / "board"))
    events.Reload()
    first, last = events.Scalars("eval/read_locally/bits_per_byte")
    assert (first.step, last.step) == (2, 4)
    assert last.value == pytest.approx(runner.scores()[4]["read_locally"]["bits_per_byte"])


def test_tasks_do_not_change_the_training(
    evaluated: tuple[TaskRunner, list[Outcome]], pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    plain = make_runner(pool, corpus, tmp_path / "plain")
    succeed(plain.launch(""))
    runner, _ = evaluated
    assert plain.numbers() == runner.numbers()
    assert len(plain.numbers()) == 4
    for iteration in (2, 4):
        ours = open_checkpoint(runner.folder, iteration).state
        theirs = open_checkpoint(plain.folder, iteration).state
        for key in ("consumed_samples", "consumed_tokens", "consumed_valid_samples", "data"):
            assert ours[key] == theirs[key], key


def test_a_resumed_run_repeats_each_score(
    evaluated: tuple[TaskRunner, list[Outcome]],
    pool: ProcessPool,
    corpus: str,
    tasks: Path,
    tmp_path: Path,
) -> None:
    resumed = make_runner(pool, corpus, tmp_path / "resumed")
    succeed(resumed.launch(f"{flags_of(tasks)} --exit-interval 2"))
    assert list(resumed.scores()) == [2]
    succeed(resumed.launch(flags_of(tasks)))
    runner, _ = evaluated
    assert resumed.scores() == runner.scores()
    assert resumed.numbers() == runner.numbers()


def test_an_evaluation_without_training_gives_the_same_scores(
    evaluated: tuple[TaskRunner, list[Outcome]], tasks: Path, tmp_path: Path
) -> None:
    runner, outcomes = evaluated
    flags = flags_of(tasks).replace("--eval-tasks-interval 2", "--eval-only --load-iteration 2")
    metrics = tmp_path / "metrics.jsonl"
    (outcome,) = runner.launch(f"{flags} --metrics-file {metrics}")
    succeed([outcome])
    assert outcome.value == outcomes[0].value[:1]
    (entry,) = read_metrics(metrics)
    assert entry == {"iteration": 2, "tasks": runner.scores()[2]}


LAYOUTS = {
    "TP 2 x PP 2": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        4,
    ),
    "ZeRO 2 on 2 ranks": ("--zero-stage 2 --global-batch-size 8", 2),
    "DeepSpeed": ("--deepspeed --zero-stage 1 --pipeline-model-parallel-size 2", 4),
}
MORE_LAYOUTS = {
    "interleaved": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        2,
    ),
    "CP 2 x TP 2": (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        4,
    ),
    "CP 4, a2a": ("--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 4", 4),
    "ZeRO 3 x TP 2": ("--zero-stage 3 --tensor-model-parallel-size 2", 4),
    "DeepSpeed ZeRO 3": ("--deepspeed --zero-stage 3", 2),
    "DeepSpeed ZeRO 1 x TP 2": ("--deepspeed --zero-stage 1 --tensor-model-parallel-size 2", 4),
    "recomputation": ("--checkpoint-activations --pipeline-model-parallel-size 2", 4),
    "padding on the last rank": (
        "--tensor-model-parallel-size 4 --num-attention-heads 4 "
        "--make-vocab-size-divisible-by 4096",
        4,
    ),
}


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_LAYOUTS)],
)
def test_every_layout_gives_the_scores_of_its_checkpoint(
    layout: str, pool: ProcessPool, corpus: str, tasks: Path, tmp_path: Path
) -> None:
    if "DeepSpeed" in layout:
        pytest.importorskip("deepspeed")
    flags, ranks = (LAYOUTS | MORE_LAYOUTS)[layout]
    runner = make_runner(pool, corpus, tmp_path / "run")
    outcomes = runner.launch(f"{flags_of(tasks)} --train-iters 3 {flags}", ranks)
    succeed(outcomes)
    first, last = outcomes[0].value
    assert all(outcome.value == [first, last] for outcome in outcomes[1:])
    compare_items(runner.folder, 2, first)
    # The end of training is evaluated, whatever the interval is.
    compare_items(runner.folder, 3, last)
    plain = make_runner(pool, corpus, tmp_path / "plain")
    succeed(plain.launch(f"--train-iters 3 {flags}", ranks))
    assert plain.numbers() == runner.numbers()


@pytest.mark.full
def test_scores_in_16_bits_are_those_of_the_checkpoint_in_16_bits(
    pool: ProcessPool, corpus: str, tasks: Path, tmp_path: Path
) -> None:
    runner = make_runner(pool, corpus, tmp_path / "run")
    flags = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 2"
    outcomes = runner.launch(f"{flags_of(tasks)} {flags}", ranks=4)
    succeed(outcomes)
    ((requests, likelihoods),) = outcomes[0].value
    model = load_model(open_checkpoint(runner.folder, 2)).to(torch.bfloat16)
    expected = Scorer(StagedModel(model), 4).score(requests)
    for (log_likelihood, _), item in zip(likelihoods, expected, strict=True):
        assert log_likelihood == pytest.approx(item.log_likelihood, rel=0.02)


def test_a_missing_folder_is_refused_before_training(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    runner = make_runner(pool, corpus, tmp_path / "run")
    flags = "--eval-tasks piqa --eval-tasks-interval 1 --eval-tasks-folder /absent"
    (outcome,) = runner.launch(flags)
    assert outcome.kind == "ConfigError"
    assert "--eval-tasks-folder /absent is not a folder" in str(outcome.error)
    assert not runner.folder.exists()


def test_every_rank_refuses_what_cannot_run_in_the_loop(
    pool: ProcessPool, corpus: str, tasks: Path, tmp_path: Path
) -> None:
    runner = make_runner(pool, corpus, tmp_path / "run")
    flags = f"--eval-tasks-interval 1 --eval-tasks-folder {tasks} --eval-tasks"
    outcomes = runner.launch(f"{flags} choose_locally write_locally", ranks=2)
    for outcome in outcomes:
        assert outcome.kind == "ConfigError"
        assert "--eval-tasks write_locally needs generate_until" in str(outcome.error)
        assert "tools/evaluate.py" in str(outcome.error)
    (outcome,) = runner.launch(
        f"{flags} choose_locally --vocab-file None --merge-file None --vocab-size 5000"
    )
    assert outcome.kind == "ConfigError"
    assert "--eval-tasks needs the tokenizer" in str(outcome.error)
    broken = tmp_path / "broken"
    broken.mkdir()
    text = (tasks / "read.yaml").read_text().replace("data.jsonl", "absent.jsonl")
    (broken / "read.yaml").write_text(text.replace("read_locally", "broken_locally"))
    (outcome,) = runner.launch(
        f"--eval-tasks broken_locally --eval-tasks-interval 1 --eval-tasks-folder {broken}"
    )
    assert outcome.kind == "ConfigError"
    assert "cannot prepare" in str(outcome.error)


def test_every_rank_reports_a_metric_that_fails(
    pool: ProcessPool, corpus: str, tasks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "failing.py").write_text("def fail(items):\n    raise ValueError('no items')\n")
    text = (tasks / "read.yaml").read_text().replace("read_locally", "failing_locally")
    text = text[: text.index("metric_list")]
    metric = "{metric: bits_per_byte, aggregation: !function failing.fail}"
    (folder / "failing.yaml").write_text(f"{text}metric_list: [{metric}]\n")
    runner = make_runner(pool, corpus, tmp_path / "run")
    outcomes = runner.launch(
        f"--eval-tasks failing_locally --eval-tasks-interval 2 --eval-tasks-folder {folder}",
        ranks=2,
    )
    for outcome in outcomes:
        assert outcome.kind == "TrainingError"
        assert "cannot compute the scores of --eval-tasks" in str(outcome.error)


def find(names: list[str], folder: Path | None) -> Any:
    return find_tasks(names, folder, names_flag="--eval-tasks", folder_flag="--eval-tasks-folder")


def test_own_tasks_are_found_without_those_of_the_harness(tasks: Path) -> None:
    manager = find(["choose_locally", "write_locally"], tasks)
    assert "piqa" not in manager.all_tasks


@pytest.mark.full
def test_an_unknown_task_is_named(tasks: Path) -> None:
    with pytest.raises(ConfigError, match=r"--eval-tasks absent_task: .* has no such task"):
        find(["piqa", "choose_locally", "absent_task"], tasks)


def read_random_states() -> list[Any]:
    numpy = [str(part) for part in np.random.get_state()]
    return [random.getstate(), numpy, torch.get_rng_state().tolist()]


def test_the_harness_leaves_the_random_numbers_of_training(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from megatron.extras.inference.scoring.harness import FixedTasks

    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=str(VOCAB), merge_file=str(MERGES)))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = read_random_states()
    own = find(["repeat_locally"], tasks)
    built = FixedTasks(own, ["repeat_locally"], tokenizer, 32, num_fewshot=2, limit=3)
    assert len(built.requests) == 3
    answers = torch.zeros((3, 2), dtype=torch.float64)
    assert built.compute_scores(answers)["repeat_locally"] == {"perplexity": 1.0, "acc": 0.0}
    # The answers of an earlier evaluation are forgotten.
    answers[:, 1] = 1.0
    assert built.compute_scores(answers)["repeat_locally"]["acc"] == 1.0
    assert read_random_states() == before


def test_a_perplexity_that_is_too_large_is_infinite(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from megatron.extras.inference.scoring.harness import FixedTasks

    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=str(VOCAB), merge_file=str(MERGES)))
    built = FixedTasks(find(["read_locally"], tasks), ["read_locally"], tokenizer, 32)
    answers = torch.full((len(built.requests), 2), -10_000.0, dtype=torch.float64)
    scores = built.compute_scores(answers)["read_locally"]
    assert scores["word_perplexity"] == math.inf
    assert 100 < scores["bits_per_byte"] < math.inf


def test_a_continuation_that_does_not_fit_is_refused(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from megatron.extras.inference.scoring.harness import FixedTasks

    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=str(VOCAB), merge_file=str(MERGES)))
    with pytest.raises(ConfigError, match=r"--eval-tasks choose_locally: .* does not fit"):
        FixedTasks(find(["choose_locally"], tasks), ["choose_locally"], tokenizer, 3)


def test_a_missing_harness_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"--eval-tasks needs .*\.\[eval\]"):
        find(["piqa"], None)
