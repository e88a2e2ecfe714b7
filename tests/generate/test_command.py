"""The command line of text generation, with a small run of its own."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import tyro
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB
from tokenizer.test_tokenizers import folder_with

from megatron.extras.inference.commands import generate
from megatron.extras.interop.convert.importing import import_model

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 2e-2 --train-iters 4 --eval-iters 0 --init-method-std 0.2"
)
GREEDY = "--temperature 0 --max-new-tokens 6"
PROMPTS = ["Once upon a time", "The", "Zürich is a city in"]


@pytest.fixture(scope="module")
def run(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run at TP 2 x PP 2."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    paths = (
        f"--data-path {corpus} --data-cache-path {folder}/cache --vocab-file {VOCAB} "
        f"--merge-file {MERGES} --save {folder}"
    )
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    succeed(pool.run(4, pretrain, f"{SIZES} {paths} {layout}".split()))
    return folder


def call(capsys: pytest.CaptureFixture[str], run: Path, flags: str, *more: str) -> tuple[str, str]:
    """Return what a successful command prints to standard output and to standard error."""
    assert generate.main(["--load", str(run), *flags.split(), *more]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def call_on_rank(argv: list[str], typed: str = "") -> None:
    """Run the command as one of several ranks. `typed` is rank 0's standard input."""
    before = sys.stdin
    # The input of the other ranks must not be read.
    sys.stdin = io.StringIO(typed if os.environ["RANK"] == "0" else "text of another rank")
    try:
        # After an error, `main` would end the process.
        generate.run(tyro.cli(generate.GenerateArguments, args=argv))
    finally:
        sys.stdin = before


def test_prompts_of_a_file_are_answered_in_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = [call(capsys, run, GREEDY, "--prompt", prompt)[0] for prompt in PROMPTS]
    assert all(text.startswith(prompt) for text, prompt in zip(single, PROMPTS, strict=True))
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    objects = tmp_path / "prompts.jsonl"
    objects.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    for file in (lines, objects):
        for size in (1, 2, 8):
            texts, _ = call(capsys, run, f"{GREEDY} --prompt-file {file} --batch-size {size}")
            assert texts == "---\n".join(single)
    printed, _ = call(capsys, run, f"{GREEDY} --prompt-file {lines} --json")
    found = [json.loads(line) for line in printed.splitlines()]
    assert [each["prompt"] + each["text"] + "\n" for each in found] == single
    assert {each["reason"] for each in found} == {"max-new-tokens"}
    assert [each["new_tokens"] for each in found] == [6, 6, 6]


def test_a_text_is_printed_while_it_is_generated(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **rest: printed.append(text))
    call(capsys, run, GREEDY, "--prompt", PROMPTS[0])
    assert printed[0] == PROMPTS[0]
    assert len(printed) > 4
    assert printed[-1] == "\n"


def test_interactive_answers_each_line_and_survives_a_long_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [call(capsys, run, GREEDY, "--prompt", prompt)[0] for prompt in PROMPTS[:2]]
    typed = f"{PROMPTS[0]}\n\n{'word ' * 40}\n{PROMPTS[1]}"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    texts, errors = call(capsys, run, f"{GREEDY} --interactive")
    assert texts == "".join(expected)
    assert "error: the prompt has" in errors


def test_the_end_of_the_context_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--temperature 0 --max-new-tokens 100 --json"
    printed, errors = call(capsys, run, command, "--prompt", "The")
    assert json.loads(printed)["reason"] == "context-length"
    assert "warning: --prompt: the text ends after" in errors
    assert "context of 32 tokens" in errors


def test_a_seed_repeats_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--temperature 2 --top-k 0 --top-p 0.95 --max-new-tokens 20 --prompt The --seed"
    first, _ = call(capsys, run, f"{command} 1")
    assert call(capsys, run, f"{command} 1")[0] == first
    assert call(capsys, run, f"{command} 2")[0] != first


def test_bf16_and_a_moved_tokenizer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "vocab.json"
    moved.write_bytes(Path(VOCAB).read_bytes())
    text, _ = call(
        capsys, run, f"{GREEDY} --dtype bf16 --vocab-file {moved} --device cpu", "--prompt", "The"
    )
    assert text.startswith("The")
    assert len(text) > len("The\n")


def test_a_run_without_a_tokenizer_gets_one_of_another_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(vocab_size=5001, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path / "source")
    import_model(tmp_path / "source", tmp_path / "run")
    flags = ["--load", str(tmp_path / "run"), "--prompt", "The", "--max-new-tokens", "2"]
    assert generate.main(flags) == 2
    printed = capsys.readouterr().err
    assert "--tokenizer-type PretrainedFromHF" in printed
    folder = folder_with(tmp_path / "tokenizer")
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-name-or-path", str(folder)]
    assert generate.main([*flags, *named]) == 0
    assert capsys.readouterr().out.startswith("The")
    assert generate.main(["--load", str(tmp_path / "source"), "--prompt", "The"]) == 2
    assert "holds a checkpoint of Hugging Face; convert it" in capsys.readouterr().err


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2)])
def test_one_of_several_ranks_prints(
    tensor: int,
    pipeline: int,
    run: Path,
    tmp_path: Path,
    pool: ProcessPool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    layout = ["--tensor-model-parallel-size", str(tensor)]
    layout += ["--pipeline-model-parallel-size", str(pipeline)]
    sampled = "--temperature 1 --max-new-tokens 6 --stop e --seed 3"
    # A single streamed text, a batch, and typed prompts, one of which is too long.
    typed = f"{PROMPTS[0]}\n\n{'word ' * 40}\n{PROMPTS[1]}"
    for flags, more, lines in (
        (GREEDY, ["--prompt", PROMPTS[0]], ""),
        (sampled, ["--prompt-file", str(prompts), "--json"], ""),
        (sampled, ["--interactive"], typed),
    ):
        if lines:
            answers = [call(capsys, run, flags, "--prompt", each)[0] for each in PROMPTS[:2]]
            expected = "".join(answers)
        else:
            expected, _ = call(capsys, run, flags, *more)
        argv = ["--load", str(run), *flags.split(), *more, *layout]
        outcomes = pool.run(tensor * pipeline, call_on_rank, argv, lines)
        succeed(outcomes)
        printed = [outcome.output for outcome in outcomes]
        assert printed[1:] == [""] * (tensor * pipeline - 1)
        assert printed[0] == expected


@pytest.mark.full
def test_sinks_and_a_window_on_tensor_ranks(
    pool: ProcessPool, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = f"--data-path {corpus} --vocab-file {VOCAB} --merge-file {MERGES} --save {tmp_path}/run"
    model = "--softmax-type learnable --sliding-window 5 --full-attention-layers 1"
    succeed(pool.run(1, pretrain, f"{SIZES} {paths} {model}".split()))
    prompts = tmp_path / "prompts.txt"
    # The prompts of a batch have different lengths.
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    flags = f"{GREEDY} --prompt-file {prompts} --json"
    expected, _ = call(capsys, tmp_path / "run", f"{flags} --batch-size 1")
    layout = "--tensor-model-parallel-size 2"
    argv = f"--load {tmp_path}/run {flags} {layout} --batch-size 3".split()
    outcomes = pool.run(2, call_on_rank, argv)
    succeed(outcomes)
    assert outcomes[0].output == expected


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (["--prompt", "a", "--interactive"], "several sources"),
        (["--prompt", "a", "--temperature", "1e-50"], "--temperature 1e-50"),
        (["--prompt", "a", "--pipeline-model-parallel-size", "0"], "must be at least 1"),
        (["--prompt", "a", "--tensor-model-parallel-size", "2"], "--nproc-per-node 2"),
        (["--prompt", "a", "--distributed-timeout-minutes", "0"], "must be above 0"),
        (["--prompt-file", "{folder}/missing.txt"], "cannot be read"),
        (["--prompt-file", "{folder}"], "cannot be read"),
        (["--prompt-file", "{folder}/empty.txt"], "has no prompt"),
        (["--prompt-file", "{folder}/binary.txt"], "is not UTF-8"),
        (["--prompt-file", "{folder}/half.jsonl"], "prompt 1 is not UTF-8 text"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        (["--prompt", "a", "--load", "{folder}/missing"], "does not exist"),
    ],
)
def test_a_wrong_command_is_refused(
    flags: list[str],
    phrase: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}')
    given = [flag.format(folder=tmp_path) for flag in flags]
    assert generate.main(["--load", str(run), *given]) == 2
    captured = capsys.readouterr()
    assert phrase in captured.err
    assert captured.out == ""


def test_bytes_that_are_no_text_do_not_end_a_session(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = call(capsys, run, GREEDY, "--prompt", "The")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\nThe\n")))
    texts, errors = call(capsys, run, f"{GREEDY} --interactive")
    assert texts == expected
    assert "the prompt is not UTF-8 text" in errors
    monkeypatch.setattr("sys.stdin", None)
    assert generate.main(["--load", str(run), "--interactive"]) == 2
    assert "which is closed" in capsys.readouterr().err
