"""The tokenizer and the chat template of gpt-oss, in the form that its files have.

The pattern and the special tokens are those that tiktoken publishes as o200k_harmony, and the
template is the published one. The vocabulary of the short tests is small. The long test has the
published one, if tiktoken can read it (from its cache, or from the network).
"""

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiktoken
import transformers
from conversations.chat_files import FIXTURES, make_config
from conversations.test_public_templates import OWN, read_trl
from tiktoken_ext import openai_public
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from megatron.base.errors import DataError
from megatron.extras.inference.commands.generate import ChatSession
from megatron.extras.preparation.conversations.build import ConversationJob, RowEncoder
from megatron.extras.preparation.conversations.rows import parse_row
from megatron.tokenizer.build import HFTokenizer, build_byte_level_bpe, build_tokenizer

NAMES = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>"),
    *("<|return|>", "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>"),
    *("<|end|>", "<|message|>", *(f"<|reserved_{n}|>" for n in range(200009, 200012)), "<|call|>"),
    *(f"<|reserved_{n}|>" for n in range(200013, 200018)),
    "<|endofprompt|>",
)
"""The special tokens of the published tokenizer.json, in the order of their ids."""
SETTINGS = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|return|>",
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
PUBLISHED = "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"
"""SHA-256 of the tokenizer.json of openai/gpt-oss-20b and gpt-oss-120b."""


def read_small_ranks() -> dict[bytes, int]:
    """Return the vocabulary of a small byte-level BPE in tiktoken's form."""
    backend = build_byte_level_bpe(
        f"{FIXTURES}/gpt2-tiny-vocab.json", f"{FIXTURES}/gpt2-tiny-merges.txt"
    )
    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    ids = {text: at for text, at in backend.get_vocab().items() if not text.startswith("<|")}
    # The bytes come first, and then the merges, as in each such vocabulary.
    texts = sorted(ids, key=lambda text: ids[text])
    return {bytes(byte_of[each] for each in text): rank for rank, text in enumerate(texts)}


def write_folder(folder: Path, ranks: dict[bytes, int], pattern: str) -> Path:
    """Write the files of a tokenizer as transformers converts them."""
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=NAMES)
    folder.mkdir()
    with patch.object(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda url: ranks)):
        converter.converted().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (folder / "chat_template.jinja").write_text(read_trl("gptoss"))
    return folder


def make_encoding(ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    """Return tiktoken's own tokenizer of a vocabulary."""
    special = {name: len(ranks) + number for number, name in enumerate(NAMES)}
    return tiktoken.Encoding(
        "harmony", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


@pytest.fixture(scope="module")
def pattern() -> str:
    with patch.object(openai_public, "load_tiktoken_bpe", lambda *arguments, **named: {}):
        spec = openai_public.o200k_harmony()
    assert all(spec["special_tokens"][name] == 199998 + at for at, name in enumerate(NAMES))
    return str(spec["pat_str"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pattern: str) -> Path:
    return write_folder(tmp_path_factory.mktemp("oss") / "small", read_small_ranks(), pattern)


def draw_texts(count: int) -> list[str]:
    """Return texts on whose parts the pattern decides."""
    rng = random.Random(1)
    parts = (
        *" \n\t\r'sSltRE/.,0123ab",
        *"\u00a0\u2003ÉéßIi漢字يहि🙂👍🏽",
        "I'LL",
        "don't",
        "<|end|>",
    )
    return ["".join(rng.choices(parts, k=rng.randint(1, 40))) for _ in range(count)]


def compare_ids(folder: Path, encoding: tiktoken.Encoding, texts: Sequence[str]) -> None:
    """Compare the ids of texts, and of a text with special tokens."""
    tokenizer = build_tokenizer(make_config(folder))
    assert isinstance(tokenizer, HFTokenizer)
    for text, ids in zip(texts, tokenizer.encode_batch([*texts]), strict=True):
        assert ids == encoding.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == encoding.n_vocab
    assert tokenizer.decode([tokenizer.eod]) == "<|return|>"
    turn = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    tokenizer.backend.encode_special_tokens = False
    assert tokenizer.encode(turn) == encoding.encode(turn, allowed_special="all")


def test_ids_are_those_of_tiktoken(folder: Path, pattern: str) -> None:
    texts = [json.loads(line)["text"] for line in read_lines(20)] + draw_texts(500)
    compare_ids(folder, make_encoding(read_small_ranks(), pattern), texts)


def read_lines(count: int) -> list[str]:
    return (FIXTURES / "openwebtext-100.jsonl").read_text().splitlines()[:count]


@pytest.mark.full
def test_the_published_tokenizer(tmp_path: Path, pattern: str) -> None:
    try:
        published = tiktoken.get_encoding("o200k_harmony")
    # Without a network, each layer below has an error of its own.
    except Exception as error:
        pytest.skip(f"tiktoken has no vocabulary: {type(error).__name__}")
    written = write_folder(tmp_path / "whole", published._mergeable_ranks, pattern)
    content = (written / "tokenizer.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == PUBLISHED
    texts = [json.loads(line)["text"] for line in read_lines(100)] + draw_texts(10_000)
    compare_ids(written, make_encoding(published._mergeable_ranks, pattern), texts)
    for row in CASES.values():
        compare_with_transformers(written, row)


# ---- The chat template ----

ASKED = {"role": "user", "content": "How warm is it?"}
NINE = {"role": "tool", "content": "9"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Returns it.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
    for name in ("warmth_of", "wind_of")
]
START = "<|start|>assistant"
CALL = ' to=functions.warmth_of<|channel|>commentary json<|message|>{"town": "Oslo"}<|call|>'
RESULT = '<|start|>functions.warmth_of to=assistant<|channel|>commentary<|message|>"9"<|end|>'
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|>"
FINAL = "<|channel|>final<|message|>Nine."


def call(name: str = "warmth_of", **others: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": {"town": "Oslo"}}
    return {"role": "assistant", "tool_calls": [{"function": function}], **others}


CASES: dict[str, dict[str, Any]] = {
    "the final channel": {
        "messages": [ASKED, {"role": "assistant", "content": "Nine."}],
        "counted": [f"{FINAL}<|return|>"],
    },
    **{
        f"a thought as {name}": {
            "messages": [ASKED, {"role": "assistant", name: "I look.", "content": "Nine."}],
            "counted": [f"{THOUGHT}{START}{FINAL}<|return|>"],
        }
        for name in ("thinking", "reasoning_content", "reasoning")
    },
    # The template writes no thought of an earlier turn.
    "a thought before another question": {
        "messages": [
            *(ASKED, {"role": "assistant", "thinking": "I look.", "content": "Nine."}),
            *(ASKED, {"role": "assistant", "content": "Nine."}),
        ],
        "counted": [f"{FINAL}<|end|>", f"{FINAL}<|return|>"],
    },
    "a call at the end": {
        "messages": [ASKED, call(thinking="I look.")],
        "counted": [f"{THOUGHT}{START}{CALL}"],
    },
    "a call whose content is the thought": {
        "messages": [ASKED, call(content="I look.")],
        "counted": [f"{THOUGHT}{START}{CALL}"],
    },
    "an answer after a call": {
        "messages": [
            *(ASKED, call(thinking="I look."), NINE),
            {"role": "assistant", "thinking": "I look.", "content": "Nine."},
        ],
        "counted": [CALL, f"{THOUGHT}{START}{FINAL}<|return|>"],
    },
    "a call after a call": {
        "messages": [ASKED, call(thinking="I look."), NINE, call("wind_of", thinking="I look.")],
        "counted": [
            f"{THOUGHT}{START}{CALL}",
            f"{THOUGHT}{START}{CALL}".replace("warmth", "wind"),
        ],
    },
    # A table gives each message this key.
    "no calls": {
        "messages": [ASKED, {"role": "assistant", "content": "Nine.", "tool_calls": []}],
        "counted": [f"{FINAL}<|return|>"],
    },
}
REFUSED = {
    "two calls in a message": (
        {**call(), "tool_calls": 2 * call()["tool_calls"]},
        "does not write the call",
    ),
    "a thought and a content in a call": (
        call(thinking="I look.", content="Wait."),
        "Cannot pass both content and thinking",
    ),
    "arguments as a text": (
        {**call(), "tool_calls": [{"name": "warmth_of", "arguments": '{"town": "Oslo"}'}]},
        "quotes the arguments of the call of 'warmth_of' once more",
    ),
    "a channel in the content": (
        {"role": "assistant", "content": "<|channel|>final<|message|>Nine."},
        "spells the special token",
    ),
}  # fmt: skip


@functools.cache
def load(folder: Path) -> tuple[RowEncoder, Any]:
    """Return the encoder of conversations, and the tokenizer of transformers."""
    encoder = RowEncoder(ConversationJob(("x",), "x", make_config(folder)))
    return encoder, transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def encode(folder: Path, messages: Sequence[Any], tools: Any) -> tuple[list[int], list[str]]:
    """Return the ids of a conversation, and the texts of the ranges that count."""
    encoder, reference = load(folder)
    conversation = parse_row(json.dumps({"messages": messages, "tools": tools}).encode())
    assert conversation is not None
    stored = encoder.encode(conversation).tolist()
    counted: list[list[int]] = [[]]
    for each in stored:
        if each >= 0:
            counted[-1].append(each)
        elif counted[-1]:
            counted.append([])
    texts = [reference.decode(ids) for ids in counted if ids]
    return [max(each, ~each) for each in stored], texts


def compare_with_transformers(folder: Path, row: dict[str, Any]) -> None:
    """Compare the ids with those of transformers, and what counts with the row."""
    tools = TOOLS if any("tool_calls" in each for each in row["messages"]) else None
    ids, counted = encode(folder, row["messages"], tools)
    assert counted == row["counted"]
    # transformers gives a template one name of a thought, and fails at an empty list of calls.
    renamed = [
        {
            "thinking" if "reason" in key else key: value
            for key, value in message.items()
            if value != []
        }
        for message in row["messages"]
    ]
    assert ids == load(folder)[1].apply_chat_template(renamed, tools=tools, return_dict=False)


@pytest.mark.parametrize("name", CASES)
def test_what_counts_and_the_ids_of_transformers(name: str, folder: Path) -> None:
    compare_with_transformers(folder, CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, folder: Path) -> None:
    message, reason = REFUSED[name]
    with pytest.raises(DataError, match=reason):
        encode(folder, [ASKED, message], TOOLS if "tool_calls" in message else None)


def test_a_result_of_a_tool_does_not_count(folder: Path) -> None:
    ids, _ = encode(folder, CASES["a call after a call"]["messages"], TOOLS)
    assert f"{START}{THOUGHT}{START}{CALL}{RESULT}{START}" in build_tokenizer(
        make_config(folder)
    ).decode(ids)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (f"{THOUGHT}{START}{FINAL}", FINAL),
        (FINAL, FINAL),
        # The last of two answers is the one that counts.
        (f"{FINAL}<|end|>{START}{FINAL}", FINAL),
        # The text ended in the thought.
        (THOUGHT.removesuffix("<|end|>"), "<|channel|>final<|message|>"),
    ],
)
def test_a_session_goes_on_after_an_answer_with_channels(
    answer: str, kept: str, folder: Path
) -> None:
    config = make_config(folder)
    session = ChatSession(config, build_tokenizer(config), None, history=True)
    assert session.stop == ("<|return|>",)
    (first,) = session.make_prompts(["How warm is it?"])
    session.keep("How warm is it?", answer)
    (second,) = session.make_prompts(["And now?"])
    question = "<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant"
    assert second == first + kept + question


def test_a_session_keeps_an_answer_whose_header_is_a_space(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "template.jinja"
    source.write_text(OWN["llama2"]["source"])
    config = make_config(folder)
    session = ChatSession(config, build_tokenizer(config), str(source), history=True)
    session.keep("How warm is it?", "It is nine.")
    assert "It is nine." in session.make_prompts(["And now?"])[0]
