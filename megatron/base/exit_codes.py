"""The exit codes of all commands. docs/commands.md has them as a table.

A crash, and an error that PyTorch or Python reports, give 1 as well.
"""

SUCCESS = 0
FOUND = 1
"""A check found something: numbers that differ, damage, a bad node, an alert. Or a rank crashed or
was lost, and the same command may succeed."""
USER_ERROR = 2
"""A person must fix an error. The message explains how."""
NOT_DONE = 3
"""A service did not answer in time, or each start crashes. Nothing is lost. Or a run has too few
recorded steps for a rehearsal."""
DOES_NOT_FIT = 4
"""A plan without errors needs more memory than its devices have."""
OUT_OF_TIME = 5
"""A verification had too little time for a verdict."""
INTERRUPTED = 130
"""Ctrl-C."""
CLOSED_PIPE = 141
"""Standard output was closed."""
