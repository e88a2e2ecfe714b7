"""Reports and alerts about a run, its jobs and its disks.

`status` checks a run, `disk_watch` its disks, and `alerts` sends what they find.
"""
