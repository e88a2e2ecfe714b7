"""The command line and its help are guarded: a diff in tests/golden shows when they change.

After a change that is meant: UPDATE_GOLDEN=1 python -m pytest tests/config/test_command_line_golden.py
"""

import os
import re
from pathlib import Path

import pytest

from megatron.config.cli import load_config
from megatron.config.compat import TABLE
from megatron.config.fields import all_fields
from megatron.config.help import DESCRIPTION, format_help_line

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        load_config(["--help"], prog="pretrain_gpt.py")
    return capsys.readouterr().out


def squeezed(text: str) -> str:
    """Without spaces, line breaks and boxes, which are tyro's affair."""
    return re.sub(r"[\s│╭╮╰╯─]|-----+", "", text)


def check_golden(name: str, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), (
        f"tests/golden/{name} is another; if that is meant, see this file's head"
    )


def test_flags():
    lines = []
    for field in all_fields().values():
        flags = (
            f"{field.flag}, {field.negative_flag}"
            if field.is_bool
            else f"{field.flag} {field.spec.metavar}"
        )
        lines.append(f"{flags} = {'(required)' if field.required else repr(field.default)}\n")
    for row in TABLE:
        lines.append(" ".join([row.flag, *row.only, f"({row.kind})", *row.to]) + "\n")
    check_golden("flags.txt", "".join(lines))


def test_help(help_text: str):
    """The golden file has the texts; what tyro prints has each of them after its flag, below its group's title."""
    printed, lines, group = squeezed(help_text), [DESCRIPTION, ""], ""
    position = printed.index(squeezed(DESCRIPTION))
    for field in all_fields().values():
        shown = field.negative_flag if field.default is True else field.flag
        entry = " ".join([shown, *filter(None, format_help_line(field))])
        if field.group != group:
            group = field.group
            lines.append(f"{group} options")
            position = printed.index(squeezed(f"{group} options"))
        position = printed.index(squeezed(entry), position)
        lines.append(f"  {entry}")
    check_golden("help.txt", "\n".join(lines) + "\n")
    assert squeezed("--config FILE YAML file") in printed


def test_every_field_is_explained():
    for field in all_fields().values():
        assert len(field.doc) > 10, f"{field.dotted} has no docstring"
        assert field.doc.endswith((".", "...", ")")), (
            f"{field.dotted}: its docstring is no sentence"
        )


def test_required_and_defaults_are_shown(help_text: str):
    assert squeezed("--num-layers INT Number of transformer layers. (required)") in squeezed(
        help_text
    )
    assert squeezed("(default: 969,30,1)") in squeezed(help_text)
    assert "None}" not in help_text
    assert "default: None" not in help_text
