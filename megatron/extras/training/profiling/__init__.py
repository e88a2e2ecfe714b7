"""Profiler traces (`profiler`) and memory snapshots (`memory_history`) of some iterations."""
