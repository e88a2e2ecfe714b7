"""The characters and tokens that count, for ten public templates and others."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from conversations.templates import CASES, CHATML, SPECIALS, Case

from megatron.base.errors import ConfigError, DataError
from megatron.extras.preparation.conversations.marks import Renderer, find_counted
from megatron.extras.samples.chat.template import ChatTemplate
from megatron.tokenizer.build import build_byte_level_bpe

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/openwebtext-100"
WORDS = (
    *("city", "light of", "the year\n", "été", "漢字", "🙂👍🏽", "a  b", "x\ty", "¿qué?", "<b>"),
    *("{{ 1 }}", "1 < 2", "assistant\n", "</think", "مرحبا", "e\u0301"),
)


def draw_text(rng: random.Random, most: int = 8) -> str:
    text = " ".join(rng.choices(WORDS, k=rng.randint(0, most)))
    return rng.choice(("", " ", "\n", "  \n")) + text + rng.choice(("", " ", "\n"))


def draw_conversation(rng: random.Random, case: Case) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if case.has_system and rng.random() < 0.5:
        messages.append({"role": "system", "content": draw_text(rng)})
    for _ in range(rng.choice((1, 1, 2, 3, 12))):
        messages.append({"role": "user", "content": draw_text(rng)})
        messages.append({"role": "assistant", "content": draw_text(rng)})
    if rng.random() < 0.3:
        messages.append({"role": "user", "content": draw_text(rng)})
    return messages


def make_template(case: Case, source: str | None = None) -> ChatTemplate:
    tokens = {"bos_token": case.bos, "eos_token": case.eos}
    return ChatTemplate(source or case.source, tokens, "the template")


def compare(renderer: Renderer, messages: list[dict[str, Any]], pieces: Any) -> None:
    """Compare text and counted characters with the pieces of a reference."""
    text, spans = renderer.render(messages, None)
    assert text == "".join(piece for piece, _ in pieces)
    expected = [counted for piece, counted in pieces for _ in piece]
    found = [False] * len(text)
    for start, end in spans:
        found[start:end] = [True] * (end - start)
    assert found == expected, (text, [text[a:b] for a, b in spans])


@pytest.mark.parametrize("name", CASES)
def test_marks_equal_a_reference_character_by_character(name: str) -> None:
    case = CASES[name]
    renderer = Renderer(make_template(case), case.specials, "assistant")
    rng = random.Random(name)
    compared = 0
    for _ in range(50):
        messages = draw_conversation(rng, case)
        # A template without anything before an answer cannot show where an empty one is.
        compare(renderer, messages, case.reference(messages))
        compared += 1
    assert compared == 50


def draw_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation with thoughts and calls of tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q" + draw_text(rng)}]
    for _ in range(rng.randint(1, 3)):
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(("", "wait", "a b"))}
        if rng.random() < 0.5:
            answer["reasoning_content"] = rng.choice(("hm", "so\nthen", "\nfirst"))
        calls = [
            {"function": {"name": f"find_{n}", "arguments": '{"x": "city"}'}}
            for n in range(rng.randint(0, 2))
        ]
        messages.append({**answer, "tool_calls": calls} if calls else answer)
        messages += [{"role": "tool", "content": "12 °C"} for _ in calls]
        if not calls:
            messages.append({"role": "user", "content": "q" + draw_text(rng)})
    thought = rng.choice(("", "<think>\nI see\n</think>\n\n"))
    return [*messages, {"role": "assistant", "content": thought + "done" + draw_text(rng)}]


def test_thoughts_and_calls_of_tools_count() -> None:
    case = CASES["qwen3"]
    renderer = Renderer(make_template(case), case.specials, "assistant")
    rng = random.Random(5)
    for _ in range(70):
        messages = draw_tools(rng)
        compare(renderer, messages, case.reference(messages))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tagged])
def test_a_tagged_template_gives_the_marks_of_its_twin_and_of_transformers(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    backend = make_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=case.bos, eos_token=case.eos
    )
    fast.chat_template = case.tagged
    plain = Renderer(make_template(case), case.specials, "assistant")
    tagged = Renderer(make_template(case, case.tagged), case.specials, "assistant")
    assert tagged.template.is_tagged
    assert not plain.template.is_tagged
    rng = random.Random(name)
    for _ in range(25):
        messages = draw_conversation(rng, case)
        if name == "qwen3" and rng.random() < 0.5:
            messages = draw_tools(rng)
        # transformers loses a block that begins with white space, whose tokens have no place.
        for message in messages:
            message["content"] = message["content"].strip() or "x"
        one, other = (each.render(messages, None) for each in (plain, tagged))
        assert one == other
        expected: Any = fast.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        encoding = backend.encode(one[0], add_special_tokens=False)
        assert encoding.ids == expected["input_ids"]
        found = find_counted(encoding.offsets, one[1])
        assert [int(each) for each in found] == expected["assistant_masks"]


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE with the special tokens of all templates."""
    backend = build_byte_level_bpe(
        f"{FIXTURES}/gpt2-tiny-vocab.json", f"{FIXTURES}/gpt2-tiny-merges.txt"
    )
    backend.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in SPECIALS])
    return backend


OTHERS = {
    # No special token ends a turn.
    "plain": (
        "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}",
        "### user:\na\n\n### assistant:\n[b]\n\n### user:\nc\n\n### assistant:\n[d]\n\n",
    ),
    # The end is a special token at the end of the text only.
    "end of the text": (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
        "{{ m.content }}{% endfor %}{{ '</s>' }}",
        "<|user|>a<|assistant|>[b]<|user|>c<|assistant|>[d</s>]",
    ),
    # An answer is asked for by an ordinary word.
    "names": (
        "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'BOT: ' }}{{ m.content }}"
        "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}"
        "{{ 'BOT: ' if add_generation_prompt }}",
        "USER: a BOT: [b</s>]USER: c BOT: [d</s>]",
    ),
    # The template writes answers twice, as some write a summary.
    "special brackets": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|user|>' + m.content + '<|end|>' }}{% else %}{{ m.content + '<|endoftext|>' }}"
        "{% endif %}{% endfor %}",
        "<s><|user|>a<|end|>[b<|endoftext|>]<|user|>c<|end|>[d<|endoftext|>]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_templates_of_other_kinds(name: str) -> None:
    source, expected = OTHERS[name]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "it")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    text, spans = Renderer(template, SPECIALS, "assistant").render(messages, None)
    for start, end in reversed(spans):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    assert text == expected
    _, last = Renderer(template, SPECIALS, "last").render(messages, None)
    assert last == spans[-1:]
    whole, every = Renderer(template, SPECIALS, "all").render(messages, None)
    assert every == [(0, len(whole))]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes the text"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "changes the text"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", "changes the text"),
        ("{{ messages[0].content }}", "writes no answer"),
        ("{% for i in range(10**9) %}x{% endfor %}", "not allowed"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "5 s"),
        ("{% for i in range(90000) %}{{ 'x' * 9000 }}{% endfor %}", "not allowed"),
        (
            "{% for i in range(90000) %}{{ messages[0].content.ljust(9000) }}{% endfor %}",
            "characters",
        ),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ ''.__class__ }}{{ raise_exception('no such role') }}", "no such role"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
        ("{% set x = namespace(v=2) %}{% for i in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}"
         , "bits"),
        ("{{ messages.append(1) }}", "cannot render"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_marked_or_is_hostile_is_refused(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "5 s":
        monkeypatch.setattr("megatron.extras.samples.chat.template.SECONDS", 0.3)
        reason = "0.3 s"
    started = time.monotonic()
    template = ChatTemplate(source, {}, "the template")
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "four"}]
    with pytest.raises(DataError, match=reason):
        Renderer(template, SPECIALS, "assistant").render(messages, None)
    assert time.monotonic() - started < 30


def test_no_template_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"the file is no chat template: .*endfor"):
        ChatTemplate("{% for m in messages %}", {}, "the file")
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate("{% include '/etc/passwd' %}{% generation %}", {}, "the file")


def test_a_token_counts_if_one_of_its_characters_does() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 6), (6, 9)]
    assert find_counted(offsets, [(4, 6)]) == [False, True, True, True, False]
    assert find_counted(offsets, [(0, 1), (8, 9)]) == [True, False, False, False, True]
    assert find_counted(offsets, []) == [False] * 5


def test_an_answer_that_holds_the_word_of_a_mark_is_rendered() -> None:
    case = CASES["chatml"]
    messages = [
        {"role": "user", "content": "mark0q0z"},
        {"role": "assistant", "content": "mark1q mark0q1z"},
    ]
    compare(
        Renderer(make_template(case), case.specials, "assistant"),
        messages,
        case.reference(messages),
    )
    assert "BEGIN" in CHATML


IRREGULAR = json.loads((FIXTURES.parent / "conversations/irregular_templates.json").read_text())
"""Templates of other kinds, with pieces of text and whether they count. They were written from the
rules of docs/instruct.md, without the program."""


@pytest.mark.parametrize("case", IRREGULAR, ids=lambda case: case["name"])
def test_irregular_templates(case: dict[str, Any]) -> None:
    tokens = {"bos_token": case["bos"], "eos_token": case["eos"]}
    renderer = Renderer(ChatTemplate(case["source"], tokens, "it"), case["specials"], "assistant")
    for example in case["examples"]:
        # A row has no message without a content, and no late one of the system.
        messages = [{**each, "content": each["content"] or ""} for each in example["messages"]]
        compare(renderer, messages, example["pieces"])


def test_the_irregular_templates_are_complete() -> None:
    assert len(IRREGULAR) == 14
    assert sum(len(case["examples"]) for case in IRREGULAR) == 34
