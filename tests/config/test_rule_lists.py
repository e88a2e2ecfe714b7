"""Each rule is in a list."""

import importlib
import inspect
import pkgutil

import megatron.plan.rules
from megatron.plan.rules.data import check_tokenizer_files
from megatron.plan.rules.finding import IfGiven
from megatron.plan.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS, PLAN_RULES, RESUME_RULES


def test_each_rule_is_in_a_list():
    """A rule that was written and not listed would never run."""
    rules = (check_tokenizer_files, *CONFIG_RULES, *NEEDED_BY_RUNS, *PLAN_RULES, *RESUME_RULES)
    listed = {rule.rule if isinstance(rule, IfGiven) else rule for rule in rules}
    found = 0
    for module in pkgutil.iter_modules(megatron.plan.rules.__path__, "megatron.plan.rules."):
        for name, function in vars(importlib.import_module(module.name)).items():
            if inspect.isfunction(function) and name.startswith(("check_", "warn_")):
                assert function in listed, f"{module.name}.{name}"
                found += 1
    assert found > 50
