"""Separates the warnings about what has no effect from the others.

Invariant: every message about an accepted flag or key that changes nothing contains `PHRASE`. The
compatibility table, the JSON and `warning_rules` write such messages.
"""

from collections.abc import Iterable

PHRASE = " has no effect"


def split_off_flags_without_effect(warnings: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the other warnings, and those about flags and keys without effect."""
    others: list[str] = []
    without_effect: list[str] = []
    for warning in warnings:
        if PHRASE in warning:
            without_effect.append(warning)
        else:
            others.append(warning)
    return others, without_effect


def format_warnings(warnings: Iterable[str]) -> list[str]:
    """Return the warnings as lines. What has no effect is a list of its own at their end."""
    others, without_effect = split_off_flags_without_effect(warnings)
    lines = [f"warning: {warning}" for warning in others]
    if without_effect:
        lines.append("flags without effect:")
        lines += [f"  {text}" for text in without_effect]
    return lines
