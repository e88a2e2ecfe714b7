"""Reports and alerts about a run, its jobs and its disks."""
