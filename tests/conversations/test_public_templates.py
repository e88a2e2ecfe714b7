"""What counts in nine conversations, for public templates of the package trl and others.

`public_templates.json` has the counted texts of each conversation, or null where the template must
be refused: it has no roles for tools, or leaves out a call. Those of "own" are templates with the
structure of a public one, and their references were written from the template's text alone. Those
of "trl" were compared with the marks of trl's training templates. They differ where trl counts a
part of the prompt, a line break after the end, or the end of the text.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from conversations.templates import SPECIALS
from conversations.test_marks import make_tokenizer

from megatron.base.errors import DataError
from megatron.extras.preparation.conversations import marks, rows
from megatron.extras.preparation.conversations.marks import Renderer
from megatron.extras.preparation.conversations.marks import find_counted as find_counted_tokens
from megatron.extras.preparation.conversations.rows import parse_row
from megatron.extras.samples.chat.template import ChatTemplate

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/conversations"
TABLE: dict[str, dict[str, Any]] = json.loads((FIXTURES / "public_templates.json").read_text())
GIVEN: dict[str, Any] = json.loads((FIXTURES / "public_conversations.json").read_text())
OWN = TABLE["own"]


def read_trl(name: str) -> str:
    """Return a template that trl ships. The package itself is not imported."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    return (Path(found.origin).parent / f"chat_templates/{name}.jinja").read_text()


def find_counted(case: dict[str, Any], source: str) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the name of each conversation, and its counted texts. None: it is refused."""
    template = ChatTemplate(source, {"bos_token": case["bos"], "eos_token": case["eos"]}, "it")
    renderer = Renderer(template, tuple(case["specials"]), "assistant")
    for name, messages in GIVEN["conversations"].items():
        tools = GIVEN["tools"] if "call" in name else None
        conversation = parse_row(json.dumps({"messages": messages, "tools": tools}).encode())
        assert conversation is not None
        try:
            text, spans = renderer.render(conversation.messages, conversation.tools)
            yield name, [text[start:end] for start, end in spans]
        except DataError:
            yield name, None


@pytest.mark.parametrize("name", OWN)
def test_templates_with_the_structure_of_public_ones(name: str) -> None:
    assert dict(find_counted(OWN[name], OWN[name]["source"])) == OWN[name]["counted"]


@pytest.mark.parametrize("name", TABLE["trl"])
def test_templates_of_trl(name: str) -> None:
    case = TABLE["trl"][name]
    assert dict(find_counted(case, read_trl(name))) == case["counted"]


def test_the_table_is_complete() -> None:
    cases = [*TABLE["trl"].values(), *OWN.values()]
    assert len(cases) == 56
    assert all(set(case["counted"]) == set(GIVEN["conversations"]) for case in cases)
    assert all(case["counted"]["several turns"] for case in cases)


def leave_out_last_special(find: Callable[..., Any]) -> Callable[..., Any]:
    def changed(special: Any, text: str, window: Any, *rest: Any, **named: Any) -> Any:
        end = find(special, text, window, *rest, **named)
        found = [*special.finditer(text, window[0], end)]
        return found[-1].start() if found else end

    return changed


def stop_at_first_special(find: Callable[..., Any]) -> Callable[..., Any]:
    def changed(special: Any, text: str, window: Any, *rest: Any, **named: Any) -> Any:
        found = special.search(text, *window)
        return found.end() if found else find(special, text, window, *rest, **named)

    return changed


ERRORS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "one character early": (marks, "find_start", lambda f: lambda *a: f(*a) - 1),
    "one character late": (marks, "find_start", lambda f: lambda *a: f(*a) + 1),
    "the header counts": (marks, "find_start", lambda f: lambda *a: a[2][0]),
    "only the content counts": (
        marks, "find_start", lambda f: lambda *a: min(a[3], default=f(*a)),
    ),
    "the end is left out": (marks, "find_end", leave_out_last_special),
    "one of two ends": (marks, "find_end", stop_at_first_special),
    "one character too far": (marks, "find_end", lambda f: lambda *a, **k: f(*a, **k) + 1),
    "the next header counts": (marks, "find_end", lambda f: lambda *a, **k: a[2][1]),
    "arguments do not count": (marks, "find_end", lambda f: lambda *a, **k: a[2][0]),
    "one name of a thought": (rows, "name_thoughts", lambda f: lambda message: message),
    "calls have no words": (marks, "_mark_calls", lambda f: lambda message, words: None),
}  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_the_range_of_an_answer_is_found(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, change = ERRORS[error]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    assert any(
        dict(find_counted(OWN[name], OWN[name]["source"])) != OWN[name]["counted"]
        for name in ("smollm3", "deepseek_r1", "mistral_v3", "gpt_oss")
    )


@pytest.mark.parametrize("name", ["lfm2_2_5", "lfm2_2_5_v2", "qwen3_training", "gptoss_training"])
def test_marks_of_trl_count_as_in_transformers(name: str) -> None:
    source = read_trl(name)
    backend = make_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "<|im_end|>"})
    fast.chat_template = source
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, "it")
    renderer = Renderer(template, SPECIALS, "assistant")
    compared = 0
    for title, messages in GIVEN["conversations"].items():
        # transformers loses a block that begins with white space, whose tokens have no place.
        if title == "white space" or (title == "two calls" and name.startswith("gptoss")):
            continue
        tools = GIVEN["tools"] if "call" in title else None
        conversation = parse_row(json.dumps({"messages": messages, "tools": tools}).encode())
        assert conversation is not None
        text, spans = renderer.render(conversation.messages, conversation.tools)
        expected: Any = fast.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        encoding = backend.encode(text, add_special_tokens=False)
        if encoding.ids != expected["input_ids"]:
            # The date of the day, or a name of a thought that transformers does not give.
            continue
        found = find_counted_tokens(encoding.offsets, spans)
        assert [int(each) for each in found] == expected["assistant_masks"]
        compared += 1
    assert compared >= 7
