"""Commands around a run: its report, its disks, its jobs, the Hub, a rollback."""
