"""What tools/flags.py prints agrees with the configuration and the compatibility table."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.fields import all_fields
from megatron.config.normalise import list_known_flags
from megatron.extras.interop.translators.compat import TABLE, Row, find_row, find_rows
from megatron.extras.interop.translators.translator import load_config

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def print_page() -> str:
    """Return the tables that the documentation site shows below docs/flags.md."""
    return subprocess.run(
        [sys.executable, "tools/flags.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_the_site_has_the_tables():
    assert "\n<!-- output of: python tools/flags.py -->\n" in (ROOT / "docs/flags.md").read_text()


def test_no_page_links_into_the_tables():
    """Their headings exist on the site only, so such a link is dead in the repository."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("train/*/*.md")]
    links = [link for page in pages for link in re.findall(r"flags\.md[^)\s]*\)", page.read_text())]
    assert links
    assert [link for link in links if "#" in link] == []


def test_page_has_every_flag():
    text = print_page().replace("_", "-")
    assert [
        field.flag for field in all_fields().values() if f"| `{field.flag}` |" not in text
    ] == []
    named = [row for row in TABLE if not any(f"`{row.flag}{end}" in text for end in "` =")]
    assert named == []


def test_rows_of_a_table_have_equal_columns():
    columns = 0
    for line in print_page().splitlines():
        if line.startswith("|---"):
            assert line.count("|") == columns
        elif line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            columns = columns or cells
            assert cells == columns, line
        else:
            columns = 0


MINIMAL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 "
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --num-query-groups 1 "
    "--position-embedding-type rotary"
)

# What a reason says is missing here -> the fields that would contradict it.
ABSENT = {
    "fp4": r"fp4",
    "muP": r"\.mup",
    "multi-token": r"mtp|multi_token",
    "not averaged": r"averag|\.ema",
    "speculat": r"speculat",
    "reinforcement": r"\.rl_|grpo",
    "separate encoder": r"encoder",
    "relative position": r"relative",
    "quantised": r"quant",
    "not printed": r"sanity",
    "no errors are injected": r"inject",
    "without shapes": r"profile.*shape",
    "not timed one by one": r"profile_backward",
}


def read_harmless_rows() -> list[Row]:
    """Return the harmless rows that the page lists, by the flags in its tables."""
    page = print_page()
    return [
        row
        for row in TABLE
        if row.kind == "harmless" and any(f"`{row.flag}{end}" in page for end in "` =")
    ]


def give(row: Row) -> list[str]:
    """Return the flag of a row with values that the row holds for."""
    flag = row.flag.replace("*", "x-of-a-family")
    values = [*row.only[:1]] or ["1"] * int(str(row.arity).replace("*", "0"))
    return [flag, *values]


def test_flags_without_effect_change_no_field():
    plain = load_config(MINIMAL).config
    rows = [row for row in read_harmless_rows() if find_row(give(row)[0], give(row)[1:]) == row]
    assert len(rows) > 300
    changed = []
    for row in rows:
        loaded = load_config([*MINIMAL, *give(row)])
        named = [text for text in loaded.warnings if " has no effect here: " in text]
        if loaded.config != plain or len(named) != 1:
            changed.append((row.flag, loaded.warnings))
    assert changed == []


def test_reasons_name_flags_and_programs_that_exist():
    wrong = []
    known = {*list_known_flags(), "--config", "--preset"}
    for row in TABLE:
        for flag in re.findall(r"--[a-z][a-z0-9_-]*[a-z0-9]", row.reason):
            hyphens = flag.replace("_", "-")
            if hyphens not in known and not find_rows(hyphens):
                wrong.append((row.flag, flag))
        for program in re.findall(r"tools/\w+\.py", row.reason):
            if not (ROOT / program).exists():
                wrong.append((row.flag, program))
    assert wrong == []


@pytest.mark.parametrize("claim", ABSENT)
def test_what_a_reason_says_is_missing_is_no_field(claim):
    reasons = [row.flag for row in TABLE if re.search(claim, row.reason)]
    assert reasons, "no reason says this any more: remove the claim from the test"
    assert [name for name in all_fields() if re.search(ABSENT[claim], name)] == []


def test_reasons_about_metrics_name_all_their_places():
    """Metrics go to trackers too, so a reason that lists the places without them is stale."""
    reasons = {row.reason for row in TABLE if "metrics.jsonl" in row.reason}
    assert [reason for reason in reasons if "--tracker" not in reason] == []


def test_reasons_about_checkpoints_agree_with_the_importers():
    """Checkpoints of the trainers in the table are imported, so no reason may deny it."""
    denied = [row.flag for row in TABLE if re.search(r"checkpoints? of .* not read", row.reason)]
    assert denied == []
    importers = (
        ROOT / "megatron" / "extras" / "interop" / "commands" / "convert_checkpoint.py"
    ).read_text()
    named = {name for row in TABLE for name in re.findall(r"\.py (from-[a-z-]+[a-z])", row.reason)}
    assert named
    assert [name for name in named if f'"{name}"' not in importers] == []
