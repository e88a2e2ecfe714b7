"""Hostile templates: each ends within its limits, with a message."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conversations.chat_files import make_config, write_conversations, write_tokenizer

from megatron.base.errors import ConfigError, DataError
from megatron.extras.inference.commands.generate import ChatSession
from megatron.extras.preparation.conversations.build import ConversationJob, prepare_conversations
from megatron.extras.samples.chat import template as template_module
from megatron.extras.samples.chat.template import ChatTemplate
from megatron.tokenizer.build import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NEST = "{% set a = namespace(l=[1], m=[1]) %}{% for i in range(60) %}{% set a.l = [a.l, a.l] %}{% set a.m = [a.m, a.m] %}{% endfor %}"  # noqa: E501
GROW = "{% set a = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set a.t = a.t ~ a.t %}"
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}"
QUICK = {
    **{f"{n} nested loops": "{% for a in [1] %}" * n + "{% endfor %}" * n for n in (25, 40, 400)},
    **{f"{n} nested ifs": "{% if true %}" * n + "{% endif %}" * n for n in (150, 3000)},
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "minus": "{{ " + "-" * 3000 + "1 }}",
    "not": "{{ " + "not " * 3000 + "1 }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "exponent": "{{ 9e999999999 | int }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "product of texts": "{{ 'x' * 4000000000 }}",
    "product of lists": "{{ [1] * 4000000000 }}",
    "percent": "{{ '%04000000000d' % 1 }}",
    "format": "{{ '{:4000000000}'.format(1) }}",
    "format_map": "{{ '{a:4000000000}'.format_map({'a': 1}) }}",
    "constant": "{{ 'x' | center(4000000000) }}",
    "two constants": "{{ 'x' | center(900000000) }}{{ 'y' | center(900000000) }}",
    "ljust": "{{ messages[0].content.ljust(4000000000) }}",
    "zfill": "{{ messages[0].content.zfill(4000000000) }}",
    "center of a message": "{{ messages[0].content | center(4000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ messages[0].content | indent(4000000000, true) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "range of a constant": "{% for i in range(1000000000) %}x{% endfor %}",
    "classes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "include": "{% include '/etc/passwd' %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "squares": "{% set x = namespace(v=2) %}{% for i in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}",  # noqa: E501
    "dict of itself": "{% set a = {} %}{{ a.update({1: a}) }}",
    "unknown filter": "{{ 1 | shell }}",
    "surrogate": "{{ '\\ud800' | tojson | nosuch }}",
    "a text with a surrogate": "{{ '\\ud800' }}",
}
SLOW = {
    "comparison": NEST + "{{ a.l == a.m }}",
    "membership": NEST + "{{ a.l in [a.m] }}",
    "length of a text": NEST + "{{ a.l | string | length }}",
    "loops": LOOP + "{% endfor %}{% endfor %}",
    "growth": GROW + "{% endfor %}{{ a.t | length }}",
    "json": NEST + "{{ a.l | tojson | length }}",
    "replacement": GROW + "{% set a.t = a.t.replace('x', 'xxxxxxxx')[:200000000] %}{% endfor %}",
    "sorting": LOOP + "{{ range(90000) | sort | sum }}{% endfor %}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "four"}]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_hostile_template_ends_with_a_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SLOW:
        monkeypatch.setattr(template_module, "SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises((ConfigError, DataError), match=r"the template .{10}"):
        ChatTemplate({**QUICK, **SLOW}[name], {}, "the template").render(MESSAGES)
    assert time.monotonic() - started < 7
    # The process is there again.
    assert ChatTemplate("{{ messages[0].content }}", {}, "it").render(MESSAGES) == "one"


def test_there_are_forty_of_them() -> None:
    assert len({**QUICK, **SLOW}) >= 40


def test_a_command_ends_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "t.jinja").write_text(SLOW["comparison"])
    source = write_conversations(tmp_path / "rows.jsonl", 3)
    command = [
        sys.executable,
        "tools/preprocess_data.py",
        "--conversations",
        "--input",
        str(source),
    ]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "PretrainedFromHF"]
    command += ["--tokenizer-name-or-path", str(folder), "--chat-template"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "t.jinja")], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    family: dict[int, psutil.Process] = {}
    while process.poll() is None:
        family |= {each.pid: each for each in psutil.Process().children(recursive=True)}
        time.sleep(0.05)
    _, printed = process.communicate()
    assert process.returncode == 2
    assert "t.jinja needs more than 4 s for one conversation" in printed
    assert "Traceback" not in printed
    mine = {each.pid for each in psutil.Process().children(recursive=True)}
    assert not [pid for pid, each in family.items() if pid not in mine and each.is_running()]


def test_a_chat_has_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "SECONDS", 0.3)
    config = make_config(write_tokenizer(tmp_path / "tokenizer"))
    (tmp_path / "t.jinja").write_text(SLOW["comparison"])
    session = ChatSession(config, build_tokenizer(config), str(tmp_path / "t.jinja"), history=False)
    with pytest.raises(ConfigError, match=r"t\.jinja needs more than 0\.3 s"):
        session.make_prompts(["hello"])


def test_a_constant_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(QUICK["constant"])
    config = make_config(write_tokenizer(tmp_path / "tokenizer"))
    source = write_conversations(tmp_path / "rows.jsonl", 3)
    job = ConversationJob((str(source),), str(tmp_path / "out"), config, str(tmp_path / "t.jinja"))
    with pytest.raises(DataError, match=r"t\.jinja .*: it needs too much memory"):
        prepare_conversations(job, print)
