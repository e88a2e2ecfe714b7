"""The command line and its help equal the golden files, so a diff shows when they change.

After an intended change, write the files again:

    UPDATE_GOLDEN=1 python -m pytest tests/config/test_command_line_golden.py
"""

import os
import re
from pathlib import Path

import pytest

from megatron.config.fields import all_fields
from megatron.config.help import DESCRIPTION, format_help_line
from megatron.extras.interop.translators.compat import TABLE
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        load_config(["--help"], prog="pretrain_gpt.py")
    return capsys.readouterr().out


def remove_layout(text: str) -> str:
    """Return the text without spaces, line breaks and frames, which tyro chooses."""
    return re.sub(r"[\s│╭╮╰╯─]|-----+", "", text)


def check_golden(name: str, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), (
        f"tests/golden/{name} differs; if that is intended, see the docstring of this file"
    )


def test_flags_of_other_trainers_equal_the_golden_file():
    lines = [" ".join([row.flag, *row.only, f"({row.kind})", *row.to]) + "\n" for row in TABLE]
    check_golden("flags.txt", "".join(lines))


def test_the_help_of_each_flag_has_its_values_and_its_default():
    """So a diff of help.txt shows each change of a flag."""
    for field in all_fields().values():
        values, _, default = format_help_line(field)
        assert bool(values) != field.is_bool, field.flag
        if field.default not in (None, ()):
            assert default, field.flag


def test_help_equals_the_golden_file(help_text: str):
    """The printed help has each text of the golden file after its flag, below its group's title."""
    printed = remove_layout(help_text)
    lines = [DESCRIPTION, ""]
    group = ""
    position = printed.index(remove_layout(DESCRIPTION))
    for field in all_fields().values():
        if field.is_bool:
            shown = f"{field.flag}, {field.negative_flag}"
        else:
            shown = field.flag
        entry = " ".join([shown, *filter(None, format_help_line(field))])
        if field.group != group:
            group = field.group
            lines.append(f"{group} options")
            position = printed.index(remove_layout(f"{group} options"))
        position = printed.index(remove_layout(entry), position)
        lines.append(f"  {entry}")
    check_golden("help.txt", "\n".join(lines) + "\n")
    assert remove_layout("--config FILE YAML file") in printed


def test_help_of_one_group_has_no_other(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        load_config(["--help", "recompute"])
    printed = capsys.readouterr().out
    assert "recompute options" in printed
    assert "model options" not in printed


def test_the_example_of_the_help_is_a_configuration():
    paragraphs = DESCRIPTION.split("\n\n")
    example = next(text for text in paragraphs if text.startswith("A small model on one device:"))
    config = load_config(example.partition("pretrain_gpt.py")[2].split()).config
    assert config.batch.train_iters == 1000
    assert resolve(config, 1, vocab_size=32768).errors == ()


def test_every_field_has_a_docstring():
    for field in all_fields().values():
        assert len(field.doc) > 10, f"{field.dotted} has no docstring"
        assert field.doc.endswith((".", "...", ")")), f"{field.dotted}: no sentence"


def test_required_and_defaults_are_shown(help_text: str):
    assert remove_layout(
        "--num-layers INT Number of transformer layers. (required)"
    ) in remove_layout(help_text)
    assert remove_layout("(default: 969,30,1)") in remove_layout(help_text)
    assert "None}" not in help_text
    assert "default: None" not in help_text
