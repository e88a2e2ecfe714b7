"""Profiler traces and memory snapshots of some iterations (`profiler`)."""
