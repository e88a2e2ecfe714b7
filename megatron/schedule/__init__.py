"""Schedules as functions of progress, and the order of a step's microbatches.

Nothing here imports torch or the configuration.
"""
