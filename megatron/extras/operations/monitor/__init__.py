"""Reports and alerts about a run and its jobs.

`status` checks a run, and `alerts` sends what it and the check of disks find.
"""
