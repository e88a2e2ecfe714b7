"""Reads shell scripts: their syntax and their control flow.

`syntax` parses, `sandbox` follows the control flow of what `rewrite` returns in a contained shell,
and `needs` finds what a script needs from its user. Marks stand for unknown values.

Invariant: no command of a script runs, and no file is opened.
"""
