"""Reads shell scripts: their syntax, the values of their words, and their control flow.

`syntax` parses, `values` expands words, `sandbox` follows the control flow in a contained shell,
and `needs` finds what a script needs from its user.

Invariant: no command of a script runs, and no file is opened.
"""
