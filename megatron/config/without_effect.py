"""Separates warnings about flags without effect from other warnings.

Invariant: every warning about an accepted flag or key that changes nothing contains `PHRASE`. Such
warnings come from the compatibility table, from DeepSpeed's JSON and from `megatron.rules`.
"""

from collections.abc import Iterable

PHRASE = " has no effect"


def split_off_flags_without_effect(warnings: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return two lists: the warnings about flags and keys without effect are in the second one."""
    others: list[str] = []
    without_effect: list[str] = []
    for warning in warnings:
        if PHRASE in warning:
            without_effect.append(warning)
        else:
            others.append(warning)
    return others, without_effect


def format_warnings(warnings: Iterable[str]) -> list[str]:
    """Return the warnings as lines. Flags without effect are listed separately at the end."""
    others, without_effect = split_off_flags_without_effect(warnings)
    lines = [f"warning: {warning}" for warning in others]
    if without_effect:
        lines.append("flags without effect:")
        lines += [f"  {text}" for text in without_effect]
    return lines
