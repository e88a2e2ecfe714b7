"""Experiment trackers, fed by a process that reads the metrics file."""
