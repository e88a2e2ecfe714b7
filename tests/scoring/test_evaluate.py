"""Scores of a checkpoint, compared with those of its export in lm-evaluation-harness' own model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from process_pool import ProcessPool, pretrain, succeed
from scoring.local_tasks import read_texts, write_tasks
from tiny_corpus import GPT2, MERGES, VOCAB

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.commands import evaluate
from megatron.extras.inference.generate.load import load_model
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.inference.scoring.likelihood import Scorer, TextLoss, iterate_windows
from megatron.extras.interop.commands import convert_checkpoint
from megatron.tokenizer.build import build_tokenizer

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 --lr 1e-2 --train-iters 6 "
    "--eval-iters 0 --init-method-std 0.2 --num-query-groups 2 --ffn-hidden-size 48 "
    "--glu-activation swiglu --normalization RMSNorm --position-embedding-type rotary "
    "--no-add-bias-linear --untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module")
def run(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    paths = (
        f"--data-path {corpus} --data-cache-path {folder}/cache --vocab-file {VOCAB} "
        f"--merge-file {MERGES} --save {folder}"
    )
    succeed(pool.run(1, pretrain, f"{FLAGS} {paths}".split()))
    return folder


def test_windows_cover_each_token_once() -> None:
    tokens = list(range(100, 125))
    windows = list(iterate_windows(tokens, 7, 10))
    assert [token for _, following in windows for token in following] == tokens
    assert windows[0] == ([7], tokens[:10])
    # The last window is filled up with the text before it.
    assert windows[-1] == (tokens[14:20], tokens[20:])
    assert all(len(before) + len(after) - 1 <= 10 for before, after in windows)


def test_likelihoods_do_not_depend_on_the_batch(run: Path) -> None:
    model = load_model(open_checkpoint(run, 6))
    generator = torch.Generator().manual_seed(0)
    requests = []
    for length in (2, 3, 9, 20, 33, 50):
        ids = torch.randint(0, 5000, (length,), generator=generator).tolist()
        requests.append((ids[:1], ids[1:][:32]))
    together = Scorer(StagedModel(model), 4).score(requests)
    for request, found in zip(requests, together, strict=True):
        (alone,) = Scorer(StagedModel(model), 1).score([request])
        assert found.log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-5)
        assert found.greedy == alone.greedy
        context, following = request
        inputs = torch.tensor([[*context, *following][:-1]])
        predicted = model.compute_logits(inputs)[0].log_softmax(-1)
        expected = sum(predicted[i, token].item() for i, token in enumerate(following))
        assert found.log_likelihood == pytest.approx(expected, rel=1e-5)


def evaluate_files(run: Path, files: list[Path], out: Path, *flags: str) -> dict[str, Any]:
    command = ["--load", str(run), "--text-files", *map(str, files), "--out", str(out), *flags]
    assert evaluate.main(command) == 0
    return json.loads(out.read_text())["texts"]


def test_text_files_have_a_loss_and_bits_per_byte(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Grüße an alle. " + read_texts(1, 700)[0]
    (tmp_path / "held_out.txt").write_text(text, encoding="utf-8")
    found = evaluate_files(
        run, [tmp_path / "held_out.txt"], tmp_path / "out.json", "--tensorboard-dir", str(tmp_path)
    )[str(tmp_path / "held_out.txt")]
    assert found["bytes"] == len(text.encode())
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] * found["tokens"] / math.log(2) / found["bytes"]
    )
    # A model of random weights has about log(5000) nats. This one was trained a little.
    assert 4 < found["loss"] < 12
    assert "bits per byte" in capsys.readouterr().out
    assert list(tmp_path.glob("events.out.tfevents*"))


def evaluate_in_pool(command: list[str]) -> None:
    # After an error, `main` would end the process.
    evaluate.run(tyro.cli(evaluate.EvaluateArguments, args=command))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_several_ranks_give_the_same_numbers(
    tensor: int, pipeline: int, run: Path, pool: ProcessPool, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(read_texts(1, 500)[0], encoding="utf-8")
    alone = evaluate_files(run, [path], tmp_path / "alone.json")
    out = tmp_path / "several.json"
    command = ["--load", str(run), "--text-files", str(path), "--out", str(out)]
    evaluate_on_ranks(pool, command, tensor, pipeline)
    several = json.loads(out.read_text())
    assert several["iteration"] == 6
    assert several["texts"][str(path)]["loss"] == pytest.approx(alone[str(path)]["loss"], rel=1e-5)


def evaluate_on_ranks(pool: ProcessPool, command: list[str], tensor: int, pipeline: int) -> None:
    layout = ["--tensor-model-parallel-size", str(tensor)]
    layout += ["--pipeline-model-parallel-size", str(pipeline)]
    outcomes = pool.run(tensor * pipeline, evaluate_in_pool, [*command, *layout])
    succeed(outcomes)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2)])
def test_tasks_give_the_same_answers_on_several_ranks(
    tensor: int,
    pipeline: int,
    run: Path,
    pool: ProcessPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tasks = write_tasks(tmp_path)
    command = ["--load", str(run), "--tasks", *tasks, "--task-folder", str(tmp_path), "--out"]
    assert evaluate.main([*command, str(tmp_path / "alone.json")]) == 0
    evaluate_on_ranks(pool, [*command, str(tmp_path / "several.json")], tensor, pipeline)
    alone = json.loads((tmp_path / "alone.json").read_text())
    several = json.loads((tmp_path / "several.json").read_text())
    for task in tasks:
        assert several["tasks"][task] == pytest.approx(alone["tasks"][task], rel=1e-5)
        assert len(several["items"][task]) == 6
        for mine, item in zip(several["items"][task], alone["items"][task], strict=True):
            assert mine["doc_id"] == item["doc_id"]
            compare_answers(mine["filtered_resps"], item["filtered_resps"], rel=1e-5)


def test_scores_equal_those_of_the_exported_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tasks = write_tasks(tmp_path)
    out = tmp_path / "scores.json"
    command = ["--load", str(run), "--tasks", *tasks, "--task-folder", str(tmp_path)]
    assert evaluate.main([*command, "--out", str(out), "--batch-size", "4"]) == 0
    ours = json.loads(out.read_text())
    exported = tmp_path / "exported"
    assert convert_checkpoint.main(["to-hf", "--load", str(run), "--out", str(exported)]) == 0
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "dtype": "float32", "max_length": 32},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=1,
    )
    for task in tasks:
        for metric, value in ours["tasks"][task].items():
            if not metric.endswith("stderr"):
                expected = theirs["results"][task][f"{metric},none"]
                assert value == pytest.approx(expected, rel=1e-4), (task, metric)
        assert len(ours["items"][task]) == 6
        for mine, item in zip(ours["items"][task], theirs["samples"][task], strict=True):
            assert mine["doc_id"] == item["doc_id"]
            compare_answers(mine["filtered_resps"], item["filtered_resps"])


def compare_answers(ours: list[Any], theirs: list[Any], rel: float = 1e-4) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, tuple | list):
            # The likelihood of a choice, and whether it is the most likely text.
            assert float(mine[0]) == pytest.approx(float(other[0]), rel=rel)
            assert str(mine[1]) == str(other[1])
        elif isinstance(other, float):
            assert mine == pytest.approx(other, rel=rel)
        else:
            assert mine == other


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ("", "nothing to evaluate"),
        ("--text-files {folder}/missing.txt", "cannot be read"),
        ("--text-files {folder}/empty.txt", "is empty"),
        ("--text-files {folder}/binary.txt", "is not UTF-8"),
        ("--text-files {folder}/text.txt --out {folder}/no/out.json", "must be a file in a folder"),
        ("--text-files {folder}/text.txt --out {folder}", "must be a file in a folder"),
        ("--text-files {folder}/text.txt --out /dev/null", "must be a file in a folder"),
        ("--text-files {folder}/text.txt --tensorboard-dir {folder}/text.txt", "is not a folder"),
        ("--text-files {folder}/text.txt --num-fewshot -1", "--num-fewshot -1"),
        ("--text-files {folder}/text.txt --pipeline-model-parallel-size 0", "must be at least 1"),
        ("--text-files {folder}/text.txt --pipeline-model-parallel-size 2", "--nproc-per-node 2"),
    ],
)
def test_a_wrong_command_is_refused_before_the_checkpoint_is_loaded(
    flags: str, phrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    command = ["--load", str(tmp_path / "run"), *flags.format(folder=tmp_path).split()]
    assert evaluate.main(command) == 2
    captured = capsys.readouterr()
    assert phrase in captured.err
    assert captured.out == ""


def test_the_bytes_of_a_text_are_those_of_its_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    assert evaluate_files(run, [path], tmp_path / "out.json")[str(path)]["bytes"] == 10


def test_a_continuation_longer_than_the_context_is_refused(run: Path) -> None:
    scorer = Scorer(StagedModel(load_model(open_checkpoint(run, 6))), 2)
    with pytest.raises(ConfigError, match="a continuation of 33 tokens does not fit"):
        scorer.score([([1], [2]), ([1], [2] * 33)])
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ({"max_gen_toks": -5}, "max_gen_toks must be"),
        ({"max_gen_toks": "many"}, "many"),
        ({"do_sample": True, "temperature": -1.0}, "--temperature -1.0"),
        ({"do_sample": True, "top_p": None}, "NoneType"),
    ],
)
def test_wrong_settings_of_a_task_are_refused(
    settings: dict[str, Any], phrase: str, run: Path
) -> None:
    pytest.importorskip("lm_eval")
    from megatron.extras.inference.scoring.harness import CheckpointLM

    model = StagedModel(load_model(open_checkpoint(run, 6)))
    lm = CheckpointLM(model, build_tokenizer(GPT2), 1)
    with pytest.raises(ConfigError, match=phrase):
        lm._read_settings(settings)


def test_a_task_without_its_data_is_reported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    (folder / "data.jsonl").unlink()
    command = ["--load", str(run), "--tasks", "read_locally", "--task-folder", str(folder)]
    assert evaluate.main(command) == 2
    assert "cannot prepare read_locally" in capsys.readouterr().err


def test_a_loss_that_is_too_large_has_an_infinite_perplexity() -> None:
    found = TextLoss(tokens=1, bytes=2, nats=1000.0)
    assert found.perplexity == math.inf
    assert found.bits_per_byte == pytest.approx(500 / math.log(2))


def test_the_loss_at_each_position(run: Path, tmp_path: Path) -> None:
    scorer = Scorer(StagedModel(load_model(open_checkpoint(run, 6))), 2)
    tokens = torch.randint(0, 5000, (3 * 32 + 5,), generator=torch.Generator().manual_seed(1))
    found = scorer.measure_positions(tokens.tolist(), 7, 32)
    samples = [tokens[start : start + 32].tolist() for start in (0, 32, 64)]

    def mean(length: int) -> float:
        scores = scorer.score([([7], sample[:length]) for sample in samples])
        return -sum(score.log_likelihood for score in scores) / 3

    assert sum(found) == pytest.approx(mean(32), rel=1e-5)
    assert found[20] == pytest.approx(mean(21) - mean(20), rel=1e-3)
    with pytest.raises(ConfigError, match="has no sample of 32"):
        scorer.measure_positions(tokens[:31].tolist(), 7, 32)


def test_the_picture_of_two_runs(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a long text with many words " * 30)
    paths = ["--load", str(run), "--text-files", str(text), "--out", str(tmp_path / "out.json")]
    picture = ["--by-position", str(tmp_path / "loss.png"), "--compare-with", f"{run}/"]
    assert evaluate.main([*paths, *picture]) == 0
    assert (tmp_path / "loss.png").stat().st_size > 1000
    record = json.loads((tmp_path / "out.json").read_text())["loss_by_position"]
    assert record[str(run)] == record[f"{run}/"]
    assert len(record[str(run)]) == 32
    assert evaluate.main([*paths, "--compare-with", str(run)]) == 2
