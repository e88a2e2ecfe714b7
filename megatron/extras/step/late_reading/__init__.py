"""Engines whose host reads the numbers of a step while the device computes the next one."""
