"""From files of conversations to a data set: formats, bad rows, long conversations."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
from conversations.chat_files import make_config, write_conversations, write_tokenizer

from megatron.base.errors import ConfigError, DataError
from megatron.commands import sample_idxs_to_text
from megatron.data.indexed import IndexedDataset
from megatron.extras.preparation.commands import inspect_dataset
from megatron.extras.preparation.commands import preprocess as preprocess_command
from megatron.extras.preparation.conversations.build import (
    ConversationJob,
    ConversationSummary,
    RowEncoder,
    prepare_conversations,
)
from megatron.extras.preparation.conversations.rows import parse_row, read_rows
from megatron.tokenizer.build import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ASKED = {"role": "user", "content": "the city"}
ANSWERED = {"role": "assistant", "content": "of light"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture
def prepare(
    folder: Path, tmp_path: Path
) -> Callable[..., tuple[ConversationSummary, IndexedDataset]]:
    """Return a function that prepares rows, given as objects or as the bytes of a file."""

    def run(rows: Any, **settings: Any) -> tuple[ConversationSummary, IndexedDataset]:
        source = tmp_path / settings.pop("name", "rows.jsonl")
        if isinstance(rows, list):
            rows = "\n".join(map(json.dumps, rows)).encode()
        source.write_bytes(rows)
        settings = {"output_prefix": str(tmp_path / "out"), "overwrite": True, **settings}
        job = ConversationJob((str(source),), tokenizer=make_config(folder), **settings)
        return prepare_conversations(job, lambda line: None), IndexedDataset(job.prefix)

    return run


def read(data: IndexedDataset, folder: Path) -> list[str]:
    """Return each conversation, with what counts between brackets."""
    tokenizer = build_tokenizer(make_config(folder))
    texts = []
    for number in range(len(data)):
        pieces = []
        for stored in data[number].tolist():
            text = tokenizer.decode([max(stored, ~stored)])
            pieces.append(f"[{text}]" if stored >= 0 else text)
        texts.append("".join(pieces).replace("][", ""))
    return texts


def test_rows_of_both_kinds_and_of_all_formats(prepare: Any, folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]},
        {"prompt": "the city of", "completion": " light"},
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "war"}]}]},
    ]
    summary, data = prepare(rows[:2])
    turn = "<|im_start|>user\nthe city<|im_end|>\n<|im_start|>assistant\n[of light<|im_end|>]\n"
    expected = [turn * 2, "the city of[ light<|endoftext|>]"]
    assert read(data, folder) == expected
    assert data.is_packed
    assert summary == ConversationSummary(
        2, len(data.tokens), int((data.tokens >= 0).sum()), data.sizes.max()
    )
    # ChatML's template adds texts, so a list as the content is refused by it.
    with pytest.raises(DataError, match=r"rows.jsonl:3: .*chat_template.jinja cannot render it"):
        prepare(rows)
    assert read(prepare(json.dumps(rows[:2]).encode(), name="rows.json")[1], folder) == expected
    table = pa.Table.from_pylist(
        [{"messages": rows[0]["messages"], "prompt": None, "completion": None},
         {"messages": None, "prompt": "the city of", "completion": " light"}]
    )  # fmt: skip
    pa.parquet.write_table(table, tmp_path / "table.parquet")
    content = (tmp_path / "table.parquet").read_bytes()
    assert read(prepare(content, name="rows.parquet", workers=2)[1], folder) == expected
    for loss_on, wanted in (
        ("last", turn.replace("[", "").replace("]", "") + turn),
        ("all", "<|im_start|>[" + turn.replace("[", "").replace("]", "")[12:] + turn[0:0]),
    ):
        found = read(prepare(rows[:1], loss_on=loss_on)[1], folder)[0]
        assert found.startswith(wanted)


def test_the_output_does_not_depend_on_the_workers(folder: Path, tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "rows.jsonl", 900)
    outputs = []
    for workers in (1, 3):
        prefix = tmp_path / f"out{workers}"
        job = ConversationJob((str(source),), str(prefix), make_config(folder), workers=workers)
        assert prepare_conversations(job, print).conversations == 900
        outputs.append([Path(f"{job.prefix}.{end}").read_bytes() for end in ("bin", "idx")])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"content": "x"}, ANSWERED]}, "message 1 has the role None"),
        ({"messages": [{"role": "human", "content": "x"}]}, "the role 'human'"),
        ({"messages": [{"role": "user", "content": 7}, ANSWERED]}, "a content is int"),
        ({"messages": [{"role": "user", "content": None}, ANSWERED]}, "a content is NoneType"),
        ({"messages": ["hello"]}, "message 1 is str"),
        ({"messages": []}, "must be a list that is not empty"),
        ({"messages": {"role": "user"}}, "must be a list"),
        ({"messages": [ASKED]}, "no message is of the assistant"),
        ({"messages": [{"role": "system", "content": "a"}] * 2 + [ANSWERED]}, "second system"),
        ({"messages": [ASKED, {"role": "system", "content": "a"}, ANSWERED]}, "late one"),
        ({"messages": [{**ANSWERED, "tool_calls": [{"x": 1}]}]}, "tool_calls must be"),
        ({"messages": [{**ANSWERED, "tool_calls": "f"}]}, "tool_calls must be"),
        (
            {"messages": [ASKED, {**ANSWERED, "tool_calls": [{"function": {"name": "look"}}]}]},
            "does not write the call or the description of the tool 'look'",
        ),
        ({"messages": [ASKED, ANSWERED], "tools": [{"name": "find"}]}, "of the tool 'find'"),
        ({"messages": [{**ANSWERED, "reasoning_content": [1]}]}, "a content is list"),
        ({"messages": [{"role": "assistant", "content": [{"image": 1}]}]}, "is NoneType"),
        ({"prompt": "x"}, "has the keys 'prompt', and must have messages"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"prompt": ["x"], "completion": "y"}, "prompt is list"),
        ({"text": "x"}, "has the keys 'text'"),
        ([1], "must be an object"),
        ({"messages": [{"role": "user", "content": "a<|im_end|>"}, ANSWERED]}, "spells"),
        ({"messages": [{"role": "user", "content": "a\ufdd0"}, ANSWERED]}, "U\\+FDD0"),
        (b'{"prompt": "a", "completion": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "completion": "\xff"}', "not JSON"),
        (b'{"prompt": "a"', "not JSON"),
        (b"[" * 5000 + b"]" * 5000, "not JSON|nested"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_lost(
    row: Any, reason: str, prepare: Any, tmp_path: Path
) -> None:
    good = json.dumps({"messages": [ASKED, ANSWERED]}).encode()
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    content = b"\n".join([good, b"", raw, good])
    with pytest.raises(DataError, match=rf"rows.jsonl:3: .*({reason})"):
        prepare(content, overwrite=False)
    # Nothing is left behind, and a file that exists is kept.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
    summary, data = prepare(content, on_bad_line="skip")
    assert (summary.conversations, summary.bad_lines, len(data)) == (2, 1, 2)


def test_long_conversations(prepare: Any, folder: Path) -> None:
    rows = [{"messages": [ASKED, {**ANSWERED, "content": "war " * n}]} for n in (1, 5, 300)]
    _, data = prepare(rows)
    size = int(data.sizes[1])
    with pytest.raises(DataError, match=rf"rows.jsonl:3: it has {data.sizes[2]} tokens, more than"):
        prepare(rows, longest=size)
    summary, data = prepare(rows, longest=size, on_long="drop")
    assert (summary.dropped, summary.cut, len(data)) == (1, 0, 2)
    summary, data = prepare(rows, longest=size, on_long="cut")
    assert (summary.dropped, summary.cut, data.sizes.tolist()[2]) == (0, 1, size)
    with pytest.raises(DataError, match="no conversation is left"):
        prepare(rows, longest=4, on_long="cut")
    with pytest.raises(ConfigError, match="--on-long cut needs --longest"):
        prepare(rows, on_long="cut")
    with pytest.raises(ConfigError, match="--longest 1 must be at least 2"):
        prepare(rows, longest=1)


def test_a_worker_that_runs_out_of_memory_or_is_killed_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "large.jinja"
    # No machine has so much, so this fails at once and touches no memory.
    template.write_text("{{ messages[0].content.ljust(1000 * 1000 * 1000 * 1000 * 1000) }}")
    source = write_conversations(tmp_path / "rows.jsonl", 3)
    job = ConversationJob((str(source),), str(tmp_path / "out"), make_config(folder), str(template))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*needs too much memory"):
        prepare_conversations(job, print)

    def die(self: RowEncoder, rows: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(RowEncoder, "encode_rows", die)
    job = ConversationJob((str(source),), str(tmp_path / "out"), make_config(folder))
    with pytest.raises(DataError, match=r"rows.jsonl: a worker ended in one of the rows from 1 on"):
        prepare_conversations(job, print)
    assert not list(tmp_path.glob("out*"))


def test_special_tokens_in_texts_are_allowed_by_a_flag(prepare: Any, folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a<|im_end|>"}, ANSWERED]}]
    _, data = prepare(rows, special_tokens_in_text=True)
    assert "a<|im_end|><|im_end|>" in read(data, folder)[0]


def test_the_command_and_the_inspection(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_conversations(tmp_path / "rows.jsonl", 40)
    named = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)]
    common = ["--input", str(source), "--output-prefix", str(tmp_path / "data"), *named]
    run = preprocess_command.main
    for wrong in (["--append-eod"], ["--engine", "local"], ["--json-keys", "messages"]):
        assert run([*common, "--conversations", *wrong]) != 0
        assert "--conversations" in capfd.readouterr().err
    for wrong in (["--loss-on", "all"], ["--longest", "9"], ["--chat-template", "x"]):
        assert run([*common, *wrong]) != 0
        assert "needs --conversations" in capfd.readouterr().err
    assert run([*common, "--conversations", "--chat-template", str(tmp_path / "none")]) != 0
    assert "none cannot be read" in capfd.readouterr().err
    assert run([*common, "--conversations"]) == 0
    assert "40 conversations" in capfd.readouterr().out
    prefix = str(tmp_path / "data_conversations")
    show = [prefix, *named, "--show", "2", "--seq-length", "128"]
    assert inspect_dataset.main(show) == 0
    printed = capfd.readouterr().out
    assert printed.count("<|im_start|>assistant\n«") >= 2
    assert "special token <|im_end|>:" in printed
    assert inspect_dataset.main([*show, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    data = IndexedDataset(prefix)
    assert found["counted"] == int((data.tokens >= 0).sum())
    assert [len(each["tokens"]) for each in found["shown"]] == data.sizes[:2].tolist()
    assert found["shown"][1]["counted"] == (data[1] >= 0).tolist()
    assert found["efficiency"] == pytest.approx(len(data.tokens) / found["samples"] / 129)
    assert 0.8 < found["efficiency"] <= 1
    assert inspect_dataset.main([prefix, "--show", "1"]) != 0
    assert "needs the tokenizer" in capfd.readouterr().err


def test_a_template_of_a_file_and_a_tokenizer_without_special_tokens(
    folder: Path, tmp_path: Path
) -> None:
    source = write_conversations(tmp_path / "rows.jsonl", 4)
    file = tmp_path / "own.jinja"
    shutil.copy(folder / "chat_template.jinja", file)
    job = ConversationJob((str(source),), str(tmp_path / "out"), make_config(folder))
    lines: list[str] = []
    prepare_conversations(replace(job, chat_template=str(file)), lines.append)
    assert f"copy {file} to chat_template.jinja" in "\n".join(lines)
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    contents = json.loads((plain / "tokenizer.json").read_text())
    contents["added_tokens"] = []
    (plain / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match="tokenizer has no special tokens"):
        RowEncoder(replace(job, tokenizer=make_config(plain)))


def test_an_interrupted_run_leaves_nothing_and_starts_again(folder: Path, tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "rows.jsonl", 4_000)
    named = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)]
    command = [sys.executable, "tools/preprocess_data.py", "--conversations", "--workers", "2"]
    command += ["--input", str(source), "--output-prefix", str(tmp_path / "data"), *named]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    workers: list[psutil.Process] = []
    while len(workers) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
        workers = psutil.Process(process.pid).children()
    process.kill()
    # Nobody would ever give them work again.
    _, left = psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2
    assert left == []
    process.communicate(timeout=30)
    assert not (tmp_path / "data_conversations.idx").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(IndexedDataset(tmp_path / "data_conversations")) == 4_000
    assert not list(tmp_path.glob("*.partial"))


def test_ids_equal_those_of_the_text(folder: Path) -> None:
    job = ConversationJob((), "", make_config(folder))
    row = {"messages": [ASKED, {**ANSWERED, "content": "漢字 🙂 été"}]}
    conversation = parse_row(json.dumps(row).encode())
    assert conversation is not None
    ids = RowEncoder(job).encode(conversation)
    text = "<|im_start|>user\nthe city<|im_end|>\n<|im_start|>assistant\n漢字 🙂 été<|im_end|>\n"
    backend = build_tokenizer(job.tokenizer)
    backend.backend.encode_special_tokens = False  # type: ignore[attr-defined]
    expected = backend.encode(text)
    assert np.maximum(ids, ~ids).tolist() == expected
    assert ids.dtype == np.int32


def test_samples_of_conversations_are_printed(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_conversations(tmp_path / "rows.jsonl", 30)
    job = ConversationJob((str(source),), str(tmp_path / "data"), make_config(folder))
    prepare_conversations(job, print)
    run = (
        f"--data-path {job.prefix} --tokenizer-type PretrainedFromHF "
        f"--tokenizer-name-or-path {folder} "
        "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 400 --split 1 "
        "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --reset-position-ids "
        "--reset-attention-mask --eod-mask-loss"
    )
    assert sample_idxs_to_text.main(["--samples", "0-1", "--", *run.split()]) == 0
    printed = capfd.readouterr().out
    assert printed.count("and others that are packed with it") == 2
    assert printed.count("<|im_start|>assistant\n") > 4


def test_a_map_of_a_table_is_an_object(prepare: Any, folder: Path, tmp_path: Path) -> None:
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )
    schema = pa.schema([("messages", pa.list_(message))])

    def write(argument: str) -> bytes:
        called = {"name": "look", "arguments": [("x", argument)]}
        rows = [{"messages": [ASKED, {**ANSWERED, "tool_calls": [called]}]}]
        pa.parquet.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "table.parquet")
        return (tmp_path / "table.parquet").read_bytes()

    with pytest.raises(DataError, match=r"rows.parquet:1: .*spells .*<\|im_end\|>"):
        prepare(write("a<|im_end|>"), name="rows.parquet")
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}"
    source += "{{ c.arguments.x }}<|im_end|>{% endfor %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(source)
    settings = {"name": "rows.parquet", "chat_template": str(tmp_path / "t.jinja")}
    _, data = prepare(write("it"), **settings)
    assert read(data, folder) == ["the city[of lightlookit<|im_end|>]"]


def test_rows_of_many_bytes_are_read_one_by_one(tmp_path: Path) -> None:
    text = "x" * 30_000_000
    column = pa.chunked_array([pa.array([text])] * 6)
    table = pa.table({"prompt": ["a"] * 6, "completion": column})
    pa.parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "rows.parquet").stat().st_size < 1_000_000
    before = pa.total_allocated_bytes()
    first = 1
    for rows in read_rows([str(tmp_path / "rows.parquet")]):
        assert (rows.first, len(rows.values)) == (first, 1)
        assert pa.total_allocated_bytes() - before < 200_000_000
        first += 1
    assert first == 7


def test_small_rows_are_read_together(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"] * 600, "completion": ["b"] * 600})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    sizes = [len(rows.values) for rows in read_rows([str(tmp_path / "rows.parquet")])]
    assert sizes == [256, 256, 88]


def test_thoughts_that_a_template_does_not_write_are_counted(folder: Path, tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, {**ANSWERED, name: "hm"}]} for name in ("thinking", "reasoning")]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    job = ConversationJob((str(source),), str(tmp_path / "out"), make_config(folder))
    lines: list[str] = []
    assert prepare_conversations(job, lines.append).lost_thoughts == 2
    assert "note: 2 conversations have thoughts" in lines[-1]
    with pytest.raises(DataError, match="different thoughts under"):
        parse_row({"messages": [ASKED, {**ANSWERED, "thinking": "a", "reasoning": "b"}]})


def test_the_cost_of_a_conversation_is_linear_in_its_messages(folder: Path) -> None:
    renderer = RowEncoder(ConversationJob((), "", make_config(folder))).load_template()
    counts = []
    for turns in (100, 400):
        calls = 0

        def count(*args: Any, render: Any = renderer.template.render, **named: Any) -> str:
            nonlocal calls
            calls += 1
            return str(render(*args, **named))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(renderer.template, "render", count)
            _, spans = renderer.render([ASKED, ANSWERED] * turns, None)
        assert len(spans) == turns
        counts.append(calls)
    # A conversation of four times as many messages is not rendered more often.
    assert counts[1] <= counts[0]
