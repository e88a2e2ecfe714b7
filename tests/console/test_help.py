"""--help of every tool."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

SCRIPTS = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
COMMANDS = sorted(SCRIPTS["project"]["scripts"].values())
CONVERSIONS = (
    "to-hf",
    "from-hf",
    "from-megatron-deepspeed",
    "from-megatron-lm",
    "from-gpt-neox",
    "from-nanogpt",
    "from-llm-baselines",
    "from-fms-fsdp",
)
WORDS = [
    *((command, ["--help"]) for command in COMMANDS),
    ("megatron.extras.operations.commands.chronicle:main", ["note", "--help"]),
    *(
        ("megatron.extras.interop.commands.convert_checkpoint:main", [each, "--help"])
        for each in CONVERSIONS
    ),
]


@pytest.mark.parametrize(("command", "words"), WORDS, ids=lambda value: str(value)[18:])
def test_help_has_plain_values(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
) -> None:
    module, name = command.split(":")
    monkeypatch.setattr("sys.argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(getattr(importlib.import_module(module), name)())
    assert not ended.value.code
    text = capsys.readouterr().out
    # Lines are wrapped inside of a box.
    joined = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    assert "--" in joined
    assert "{None}" not in joined
    assert "None|" not in joined
    assert "(default: None)" not in joined


def test_values_that_may_be_left_out_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.commands.plan import PlanArguments
    from megatron.console.parse import parse_arguments
    from megatron.extras.preparation.commands.inspect_dataset import InspectDatasetArguments

    given = parse_arguments(PlanArguments, args=["--world-size", "8", "--usable-share", "0.5"])
    assert (given.world_size, given.usable_share, given.hardware) == (8, 0.5, None)
    # Another name of a flag is kept.
    words = ["data", "--tokenizer-model", "folder"]
    assert "folder" in str(parse_arguments(InspectDatasetArguments, args=words))
    with pytest.raises(SystemExit):
        parse_arguments(PlanArguments, args=["--help"])
    text = capsys.readouterr().out
    assert re.search(r"--world-size INT\b", text)
    assert "(default: 0.9)" not in text
    assert "(default: 10.0)" in " ".join(text.split())
