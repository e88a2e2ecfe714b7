"""docs/rules.md agrees with the rules, and each rule is in a list."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import megatron.rules
from megatron.rules.declared import IfGiven
from megatron.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS, PLAN_RULES, RESUME_RULES
from megatron.rules.tokenizer import check_tokenizer_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "rules.md"


def test_page_is_up_to_date():
    printed = subprocess.run(
        [sys.executable, "tools/rules.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert PAGE.read_text() == printed, "run: python tools/rules.py > docs/rules.md"


def test_each_message_can_be_looked_up():
    """A message that consists of placeholders only helps nobody."""
    rows = re.findall(r"^\| (?:error|warning) \| `(.*?)`", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 300
    for message in rows:
        words = set(re.findall(r"[\w-]+", message)) - {"FLAG", "VALUE"}
        assert len(words) > 2 or any(word.startswith("--") for word in words), message


def test_each_rule_is_in_a_list():
    """A rule that was written and not listed would never run."""
    rules = (check_tokenizer_files, *CONFIG_RULES, *NEEDED_BY_RUNS, *PLAN_RULES, *RESUME_RULES)
    listed = {rule.rule if isinstance(rule, IfGiven) else rule for rule in rules}
    found = 0
    for module in pkgutil.iter_modules(megatron.rules.__path__, "megatron.rules."):
        for name, function in vars(importlib.import_module(module.name)).items():
            if inspect.isfunction(function) and name.startswith(("check_", "warn_")):
                assert function in listed, f"{module.name}.{name}"
                found += 1
    assert found > 50
