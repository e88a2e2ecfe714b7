"""Each rule is in a list."""

import importlib
import inspect
import pkgutil

import megatron.rules
from megatron.rules.declared import IfGiven
from megatron.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS, PLAN_RULES, RESUME_RULES
from megatron.rules.tokenizer import check_tokenizer_files


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
